"""Map the grid of ranks to process groups: this rank's neighbours, and the groups that connect them.

Owns process groups; `schedule/grid.py` owns the numbering. A mesh is passed explicitly, so several can exist
in one process. A mesh of one rank needs no process group.
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import torch.distributed as dist
from torch.distributed import ProcessGroup

from ds_ring.errors import RingMeshError, RingPeerError, shown
from ds_ring.limits import Limit, Timeouts
from ds_ring.schedule.grid import Grid

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from typing_extensions import Unpack

    from ds_ring.comm.protocols import Collectives, MeshOptions, Watchdog
    from ds_ring.health.client import DetectorClient
    from ds_ring.schedule.plan import Plan

# A mesh counts its calls, and messages are matched by order, so two threads that call at once would mix up
# their tensors. A forked child would use its parent's sockets.
#
# [Note: several meshes]
# Several meshes can work at the same time in different threads. They share caches without a lock: two threads
# that fill the same entry write equal values.


class Owners(dict[type, Any]):
    """Hold the owners of a mesh by class: `mesh.owners[HostMemory]` makes one at the first use.

    So a mesh knows no class of a capability. An owner lives until the mesh is closed or collected. An owner
    may define `per_ring = True` (a smaller ring of the mesh gets its own object) and `release()` (called by
    `RingMesh.close`).

    A dict, so that looking up an owner in a pass takes no call of Python.
    """

    def __init__(self, parent: Owners | None = None, is_own: Callable[[type], bool] | None = None) -> None:
        super().__init__()
        self._parent, self._is_own = parent, is_own or is_per_ring

    def __missing__(self, kind: type) -> Any:
        shared = self._parent is not None and not self._is_own(kind)
        resource = self[kind] = self._parent[kind] if self._parent is not None and shared else kind()
        return resource

    def derived(self, is_own: Callable[[type], bool] | None = None) -> Owners:
        """Return the owners of another mesh of these ranks: shared ones, and its own ones of some classes."""
        return Owners(self, is_own)

    def release(self) -> None:
        """Release and drop all owners."""
        for resource in self.values():
            getattr(resource, "release", lambda: None)()
        self.clear()


def is_per_ring(kind: type) -> bool:
    """Return whether each smaller ring of a mesh has its own object of a class."""
    return bool(getattr(kind, "per_ring", False))


class CallCounter(itertools.count):  # type: ignore[type-arg]
    """Count the headers of a ring: equal on all its ranks."""

    per_ring = True


class MeshState:
    """Hold whether a mesh can be used, and by which thread it is used now.

    Attributes:
        closed: `RingMesh.close` was called.
        broken: a transfer between GPUs failed, or did not end in time; every further call raises it.
        operations: kinds of passes so far; peers connect in a first one ([Note: compile skew]).
        patience_s: seconds that every wait may take at the least: some rank compiles; else 0.
        aborted: ids of the process groups that were aborted then.
        work_watchdog: completes messages between GPUs; made by the first exchange on the mesh.
        groups: process groups that were made for the mesh and its smaller rings.
        abandoned: a wait for a message was given up, so torch may be using a group for ever.
        process: the one that made the mesh.
        refusal: why no rank may call now; empty if ranks may.
        compared: name, value and words of the fourth integer of headers; [Note: a header on every call].
        busy, thread: held during a call (`collective.py`), and by which thread.
    """

    def __init__(self) -> None:
        self.closed = False
        self.refusal = ""
        self.broken: RingPeerError | None = None
        self.operations: set[Hashable] = set()
        self.patience_s = 0.0
        self.aborted: set[int] = set()
        self.work_watchdog: Watchdog | None = None
        self.groups: list[ProcessGroup | None] = []
        self.abandoned = False
        self.process = os.getpid()
        self.compared = ("", 0, "")
        self.busy = threading.Lock()
        self.thread: int | None = None  # the one that holds `busy`

    def is_healthy(self, detector: DetectorClient | None) -> bool:
        """Return whether no message can be under way for ever: destroying its group would not return."""
        return self.broken is None and not self.abandoned and (detector is None or detector.fault is None)

    def check(self) -> None:
        """Refuse a mesh that is closed, that another process made, or on which no rank may call now.

        Raises:
            RingMeshError: any of these.
        """
        if os.getpid() != self.process:
            expected = f"one of this process ({os.getpid()})"
            got = f"one that process {self.process} made before it forked"
            raise RingMeshError.wrong("mesh", expected, got, "start ranks by spawn, and make a mesh in each")
        if self.closed:
            raise RingMeshError.wrong(
                "mesh", "an open one", "one after mesh.close()", "use RingMesh.from_world"
            )
        if self.refusal:
            raise RingMeshError(self.refusal)

    def refuse_thread(self, detector: DetectorClient | None) -> NoReturn:
        """Tell the other ranks of two threads in a call, whose messages may be mixed up, and raise.

        Raises:
            RingMeshError: names both threads.
        """
        names = [repr(thread.name) for thread in threading.enumerate() if thread.ident == self.thread]
        why = (
            "expected one thread at a time on a mesh, got a call of thread"
            f" {threading.current_thread().name!r} while thread {(names or ['?'])[0]} is in one; ranks match"
            " messages by the order of calls: give each thread a mesh, made in the same order on every rank"
        )
        if detector is not None:
            detector.report_failure(why)
        raise RingMeshError(why)


# [Note: groups of a mesh that was dropped]
# Destroying a gloo group closes this rank's sockets and threads without communication, so ranks may do it at
# different times. It changes torch's tables of groups, and a garbage collection may interrupt torch while it
# uses them. So dropped groups are destroyed when the next mesh is made, outside of garbage collection.
# NCCL's communicators must be finalized by all ranks together: only `RingMesh.close` does that.
_groups_of_garbage: deque[list[ProcessGroup | None]] = deque()


def _drop(detector: DetectorClient | None, groups: list[ProcessGroup | None]) -> None:
    """Disconnect the detector of a mesh that is garbage; see [Note: groups of a mesh that was dropped]."""
    if detector is not None:
        detector.leave_later()
    if groups and (detector is None or detector.fault is None):
        _groups_of_garbage.append(groups)


def destroy_dropped_groups() -> None:
    """Destroy gloo's groups of the meshes that are garbage."""
    from ds_ring.comm.groups import destroy_groups

    while _groups_of_garbage:
        destroy_groups(_groups_of_garbage.popleft(), only_local=True)


class MeshCoordinates:
    """Hold what follows from the grid and the rank.

    Attributes, not properties: every call reads them, and torch.compile traces them.

    Attributes:
        ring_size, ulysses_size, sequence_size, data_size: of the grid.
        ring_rank, ulysses_rank, data_rank: this rank's coordinates.
        sequence_rank: index in the sequence group: ring_rank * ulysses_size + ulysses_rank.
        calls: counter of the ring's headers, equal on all its ranks.
        collectives: of a smaller ring that has no groups of its own; None: torch's.
    """

    collectives: ClassVar[Collectives | None] = None

    ring_size: int
    ulysses_size: int
    sequence_size: int
    data_size: int
    ring_rank: int
    ulysses_rank: int
    data_rank: int
    sequence_rank: int
    calls: CallCounter


@dataclass(frozen=True, eq=False)
class RingMesh(MeshCoordinates):
    """This process's place in the data x ring x ulysses grid, and its process groups.

    Attributes:
        grid: the numbering of the world.
        global_rank: rank of this process.
        ring_group: ranks that pass K/V around, in ring order; None for a ring of one.
        ulysses_group: ranks that split heads; None for size one.
        sequence_group: all ranks that share a sequence; None for size one.
        data_group: ranks at the same place of other sequences; None for size one.
        cpu_group: the sequence group over gloo, for headers; the same group if it is gloo already.
        detector: reports which rank failed; None if the sequence has one rank, or the process group is fake.
        owners: what the mesh holds for others: buffers, contexts, host memory, observers (`Owners`).
        state: whether the mesh can be used, and by which thread it is used now.
        ranks_per_node: consecutive ranks of the world that share a node; None if unknown.
        timeouts: how long ranks wait for each other outside of passes.
    """

    grid: Grid
    global_rank: int
    ring_group: ProcessGroup | None = None
    ulysses_group: ProcessGroup | None = None
    sequence_group: ProcessGroup | None = None
    data_group: ProcessGroup | None = None
    cpu_group: ProcessGroup | None = None
    detector: DetectorClient | None = field(default=None, repr=False)
    owners: Owners = field(default_factory=Owners, repr=False)
    state: MeshState = field(default_factory=MeshState, repr=False)
    ranks_per_node: int | None = None
    timeouts: Timeouts = field(default_factory=Timeouts, repr=False)

    def __post_init__(self) -> None:
        grid, (data, ring, ulysses) = self.grid, self.grid.coordinates(self.global_rank)
        vars(self).update(
            ring_size=grid.ring_size, ulysses_size=grid.ulysses_size, sequence_size=grid.sequence_size,
            data_size=grid.data_size, ring_rank=ring, ulysses_rank=ulysses, data_rank=data,
            sequence_rank=ring * grid.ulysses_size + ulysses, calls=self.owners[CallCounter],
        )  # fmt: skip

    def __str__(self) -> str:
        sizes = f"ring {self.ring_size} x Ulysses {self.ulysses_size} x data {self.data_size}"
        here = f"ring rank {self.ring_rank}, Ulysses rank {self.ulysses_rank}, data rank {self.data_rank}"
        return f"{sizes}; rank {self.global_rank} of {self.grid.world_size}: {here}"

    @property
    def place(self) -> tuple[int, ...]:
        """Return ring size, Ulysses size, and this process's rank in both: equal for data replicas."""
        return self.ring_size, self.ulysses_size, self.ring_rank, self.ulysses_rank

    def __reduce__(self) -> Any:
        """Refuse a pickle: process groups belong to this process."""
        raise RingMeshError.wrong(
            "RingMesh", "one that stays in its process", "a pickle of it or of a module with it",
            "save module.state_dict(), and make mesh and module anew where you load it",
        )  # fmt: skip

    def __deepcopy__(self, memo: dict[int, Any]) -> RingMesh:
        """Return this mesh: copies of a module (nn.TransformerEncoder's layers) share its process groups."""
        return self

    @classmethod
    def single(cls) -> RingMesh:
        """Return a ring of one rank that never communicates; works without torch.distributed."""
        return cls(Grid(1, 1), 0)

    @classmethod
    def from_world(
        cls,
        ring_size: int,
        ulysses_size: int = 1,
        *,
        detector: DetectorClient | None = None,
        **options: Unpack[MeshOptions],
    ) -> RingMesh:
        """Divide the initialised world into data x ring x ulysses; neighbouring ranks share a sequence.

        Collective: every rank of the world calls it, in the same order, with the same arguments.

        Args:
            ring_size: ranks of one K/V ring.
            ulysses_size: ranks that split heads by all-to-all; neighbours in the world.
            detector: a failure detector that this process has joined already; the mesh takes it over.
            options: see `MeshOptions`.

        Raises:
            RingMeshError: torch.distributed is not initialised, the sizes do not divide the world, or the
                monitor process cannot be reached.
            RingMismatchError: ranks gave different sizes.
            RingPeerError: another rank failed during the call; names it.
        """
        from ds_ring.comm.groups import compute_world_size

        grid = Grid(compute_world_size("from_world"), ring_size, ulysses_size)
        return cls._join(grid, detector, **options)

    @classmethod
    def from_groups(
        cls, sequences: Sequence[Sequence[int]], ulysses_size: int = 1, **options: Unpack[MeshOptions]
    ) -> RingMesh:
        """Cut the initialised world into the given groups of ranks, each of which shares one sequence.

        For rings that are no neighbours in the world. Collective over the world, as `from_world`.

        Args:
            sequences: the global ranks of every sequence, each rank of the world in one of them, all of one
                length. Ranks of a group are in the order ring_rank * ulysses_size + ulysses_rank.
            ulysses_size: ranks that split heads by all-to-all.
            options: see `MeshOptions`.

        Raises:
            RingMeshError: the groups are not equally long, do not hold every rank once, or ulysses_size does
                not divide them; and as `from_world`.
            RingMismatchError: ranks gave different groups.
            RingPeerError: another rank failed during the call; names it.
        """
        from ds_ring.comm.groups import compute_world_size

        return cls._join(
            Grid.from_groups(compute_world_size("from_groups"), sequences, ulysses_size), **options
        )

    @classmethod
    def from_device_mesh(
        cls,
        device_mesh: DeviceMesh,
        ring_dim: str,
        ulysses_dim: str | None = None,
        **options: Unpack[MeshOptions],
    ) -> RingMesh:
        """Make rings along one dimension of a `torch.distributed.DeviceMesh` over the whole world.

        Ranks that differ in another dimension hold other sequences. Groups are made anew: ds_ring's have
        deadlines and an order of their own.

        Args:
            device_mesh: with names for its dimensions, as `init_device_mesh("cuda", (2, 4),
                mesh_dim_names=("dp", "cp"))`.
            ring_dim: the dimension whose ranks pass K/V around.
            ulysses_dim: the dimension whose ranks split heads; None for none.
            options: see `MeshOptions`.

        Raises:
            RingMeshError: the mesh has no such dimension or is not over the world; and as `from_groups`.
        """
        from ds_ring.comm.device_mesh import list_sequences

        sequences, ulysses_size = list_sequences(device_mesh, ring_dim, ulysses_dim)
        return cls.from_groups(sequences, ulysses_size, **options)

    @classmethod
    def _join(
        cls,
        grid: Grid,
        detector: DetectorClient | None = None,
        timeout_s: float = 1800.0,
        heartbeat_timeout_s: float = 10.0,
        exit_after_fault_s: float | None = None,
        secret: str | None = None,
        ranks_per_node: int | None = None,
        timeouts: Timeouts | None = None,
    ) -> RingMesh:
        """Join the failure detector and make the groups of a grid; see `from_world`."""
        from ds_ring.comm.groups import NO_LIMIT, check_seconds, make_groups
        from ds_ring.health.joining import join_detector, leave_on_error
        from ds_ring.health.stuck_waits import call_guarded

        grid.ring_ranks_per_node(dist.get_rank(), ranks_per_node)  # raises for a bad `ranks_per_node`
        for name, value in (("timeout_s", timeout_s), ("heartbeat_timeout_s", heartbeat_timeout_s)):
            check_seconds(value, name)
        if exit_after_fault_s is not None:
            check_seconds(exit_after_fault_s, "exit_after_fault_s")
        destroy_dropped_groups()
        limits = timeouts or Timeouts(start=timeout_s)
        start = limits.limit("start") if timeouts is not None else Limit(timeout_s, "timeout_s")
        # Before any group is made: from here on every rank hears of the death of another one.
        if detector is None and grid.sequence_size > 1:
            detector = join_detector(grid, heartbeat_timeout_s, exit_after_fault_s, secret, start)
        with leave_on_error(detector):
            what = "the making of the mesh's process groups"
            groups = call_guarded(lambda: make_groups(grid, NO_LIMIT), detector, grid, what, 2, start)
        mesh = cls(grid, dist.get_rank(), *groups, detector, ranks_per_node=ranks_per_node, timeouts=limits)
        mesh.own(groups)
        # At exit the detector sends its goodbye by itself.
        weakref.finalize(mesh.state, _drop, detector, mesh.state.groups).atexit = False
        return mesh

    def own(self, groups: Iterable[ProcessGroup | None]) -> None:
        """Let `close` destroy process groups that were made for this mesh."""
        self.state.groups.extend(groups)
        if self.detector is not None:
            self.detector.exclude_groups(group for group in groups if group is not None)

    def close(self) -> None:
        """Leave the detector, destroy the process groups that the mesh has made, and free buffers.

        Call it on every rank where the groups are NCCL's. Every later use raises a RingMeshError. A mesh that
        is garbage leaves the detector by itself; its groups, if they are gloo's, are destroyed when the next
        mesh is made.
        """
        from ds_ring.comm.groups import destroy_groups

        if not self.state.closed and self.state.is_healthy(self.detector):
            destroy_groups(self.state.groups)
        self.state.closed = True
        self.state.groups.clear()
        if self.detector is not None:
            self.detector.leave()
        self.owners.release()

    def synchronize(self) -> None:
        """Wait until all messages of past calls have arrived, and raise if one has not.

        Call it before results become permanent: before `optimizer.step()` in a training loop of your own, and
        before a checkpoint. `engine.step` and `engine.save_checkpoint` of `ds_ring.initialize` call it. On
        the CPU messages have arrived when a call returns, so nothing is waited for there.

        Raises:
            RingPeerError: a message failed or came too late, or a rank has failed; names the rank.
        """
        if self.state.work_watchdog is not None:
            self.state.work_watchdog.synchronize(self)

    def fitted(self, plan: Plan) -> Plan:
        """Return a plan whose messages go between ranks of this ring that may send to each other."""
        return plan

    def global_rank_of(self, ring_rank: int) -> int:
        """Return the world rank of another member of this rank's ring; the index wraps around."""
        data, _, ulysses = self.grid.coordinates(self.global_rank)
        return self.grid.global_rank(data, ring_rank, ulysses)

    def ring_rank_of(self, global_rank: int) -> int | None:
        """Return the ring rank of a world rank that shares this rank's sequence; None for any other."""
        data, ring_rank, _ = self.grid.coordinates(global_rank)
        return ring_rank if data == self.data_rank else None

    def global_rank_in_sequence(self, sequence_rank: int) -> int:
        """Return the world rank of another member of this rank's sequence; the index wraps around."""
        place = divmod(sequence_rank % self.sequence_size, self.ulysses_size)
        return self.grid.global_rank(self.data_rank, *place)

    def describe(self, sequence_rank: int) -> str:
        """Name a member of this rank's sequence for messages."""
        ring_rank, ulysses_rank = divmod(sequence_rank, self.ulysses_size)
        place = f"ring rank {ring_rank}"
        if self.ulysses_size > 1:
            place += f", Ulysses rank {ulysses_rank}"
        if self.sequence_size == self.grid.world_size == self.ring_size and not self.grid.order:
            return place
        return f"{place} (rank {self.global_rank_in_sequence(sequence_rank)} of the world)"


def check_mesh(mesh: object) -> None:
    """Raise RingMeshError unless `mesh` is a RingMesh that can still be used."""
    if not isinstance(mesh, RingMesh):
        raise RingMeshError.wrong("mesh", "a RingMesh", shown(mesh), "use RingMesh.from_world(ring_size=...)")
    mesh.state.check()
