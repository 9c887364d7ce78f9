"""The grid as process groups: who is my neighbour, and through which group do I speak to it.

Owns process groups; the numbering is `schedule/grid.py`'s. A mesh is passed around explicitly: several can
live in one process. A mesh of one rank needs no process group at all.
"""

from __future__ import annotations

import datetime
import itertools
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from ds_ring.errors import RingMeshError
from ds_ring.runtime.buffers import Buffers
from ds_ring.runtime.trace import Trace
from ds_ring.runtime.watch import Watch, meet
from ds_ring.schedule.grid import Grid

_serial = itertools.count()


@dataclass(frozen=True, eq=False)
class RingMesh:
    """This process's place in the data x ring x ulysses grid, and its groups.

    Attributes:
        grid: the numbering of the world.
        global_rank: this process.
        ring_group: ranks that pass K/V around, in ring order; None for a ring of one.
        ulysses_group: ranks that split heads; None for size one.
        sequence_group: all ranks that share a sequence; None for size one.
        data_group: ranks that hold the same place of other sequences; None for size one.
        cpu_group: the sequence group through gloo, for headers; that group itself where it is gloo.
        serial: number of the mesh in this process, for messages.
        calls: counts the headers of this mesh; equal on all ranks as long as none was missed.
        watch: hears who failed; None where the sequence has one rank, or the process group is fake.
        buffers: memory for what travels, kept between calls; `buffers.release()` frees what is not in use.
        contexts: what `runtime/context.py` keeps for as long as this mesh lives.
        traces: those that `runtime/trace.py` is making, the innermost last. Here and not in a variable of the
            thread, since autograd runs the backward pass in a thread of its own.
    """

    grid: Grid
    global_rank: int
    ring_group: ProcessGroup | None = None
    ulysses_group: ProcessGroup | None = None
    sequence_group: ProcessGroup | None = None
    data_group: ProcessGroup | None = None
    cpu_group: ProcessGroup | None = None
    watch: Watch | None = field(default=None, repr=False)
    buffers: Buffers = field(default_factory=Buffers, repr=False)
    serial: int = field(default_factory=lambda: next(_serial))
    calls: Iterator[int] = field(default_factory=itertools.count, repr=False)
    contexts: OrderedDict[Any, Any] = field(default_factory=OrderedDict, repr=False)
    traces: list[Trace] = field(default_factory=list, repr=False)

    @classmethod
    def single(cls) -> RingMesh:
        """A ring of one rank that never communicates; works without torch.distributed."""
        return cls(Grid(1, 1), 0)

    @classmethod
    def from_world(
        cls,
        ring_size: int,
        ulysses_size: int = 1,
        *,
        timeout_s: float = 1800.0,
        heartbeat_timeout_s: float = 10.0,
        exit_after_fault_s: float | None = None,
    ) -> RingMesh:
        """Cut the initialised world into data x ring x ulysses; every rank must call it, in the same order.

        Args:
            ring_size: ranks of one K/V ring.
            ulysses_size: ranks that split heads by all-to-all; neighbours in the world.
            timeout_s: seconds until torch gives up on a collective of these groups. (Deadlines of hops
                are the exchange's and shorter.)
            heartbeat_timeout_s: seconds of silence after which a rank counts as lost; see `watch_board.py`.
            exit_after_fault_s: end this process, with its stacks, if a rank has failed and no error was
                raised here for so long (it is stuck in a collective outside ds_ring); None leaves it alone.

        Raises:
            RingMeshError: torch.distributed is not initialised, the sizes do not divide the world, or the
                ranks' watch cannot be reached.
        """
        if not dist.is_available() or not dist.is_initialized():
            raise RingMeshError(
                "RingMesh.from_world: torch.distributed is not initialised; start with the deepspeed launcher"
                " or torchrun, and call torch.distributed.init_process_group (or ds_ring.initialize) first"
            )
        grid = Grid(dist.get_world_size(), ring_size, ulysses_size)
        timeout = datetime.timedelta(seconds=timeout_s)
        sequence = _my_group(grid.sequence_groups(), timeout, None)
        fake = sequence is not None and dist.get_backend(sequence) == "fake"
        speaks_gloo = sequence is None or dist.get_backend(sequence) in ("gloo", "fake")
        watch = None
        if sequence is not None and not fake:
            store = dist.distributed_c10d._get_default_store()
            size = grid.world_size
            watch = meet(store, dist.get_rank(), size, heartbeat_timeout_s, exit_after_fault_s)
        mesh = cls(
            grid,
            dist.get_rank(),
            watch=watch,
            ring_group=_my_group(grid.ring_groups(), timeout, None),
            ulysses_group=_my_group(grid.ulysses_groups(), timeout, None),
            sequence_group=sequence,
            data_group=_my_group(grid.data_groups(), timeout, None),
            cpu_group=sequence if speaks_gloo else _my_group(grid.sequence_groups(), timeout, "gloo"),
        )
        _warm_up(mesh.ring_group)
        if watch is not None:
            weakref.finalize(mesh, watch.leave).atexit = False  # at exit the watch says goodbye by itself
        return mesh

    def close(self) -> None:
        """Leave the watch and free buffers; happens by itself when the mesh is garbage, or at exit."""
        if self.watch is not None:
            self.watch.leave()
        self.buffers.release()

    @property
    def trace(self) -> Trace | None:
        """What passes on this mesh are noted in; None for nothing."""
        return self.traces[-1] if self.traces else None

    @property
    def ring_size(self) -> int:
        return self.grid.ring_size

    @property
    def ulysses_size(self) -> int:
        return self.grid.ulysses_size

    @property
    def sequence_size(self) -> int:
        return self.grid.sequence_size

    @property
    def data_size(self) -> int:
        return self.grid.data_size

    @property
    def ring_rank(self) -> int:
        return self.grid.coordinates(self.global_rank).ring

    @property
    def ulysses_rank(self) -> int:
        return self.grid.coordinates(self.global_rank).ulysses

    @property
    def data_rank(self) -> int:
        return self.grid.coordinates(self.global_rank).data

    @property
    def sequence_rank(self) -> int:
        """Place in the sequence group: ring_rank * U + ulysses_rank."""
        return self.ring_rank * self.ulysses_size + self.ulysses_rank

    def global_rank_of(self, ring_rank: int) -> int:
        """World rank of another member of this rank's ring; the index wraps around."""
        data, _, ulysses = self.grid.coordinates(self.global_rank)
        return self.grid.global_rank(data, ring_rank, ulysses)

    def ring_rank_of(self, global_rank: int) -> int | None:
        """Ring rank of a rank of the world that shares this rank's sequence; None for any other."""
        data, ring_rank, _ = self.grid.coordinates(global_rank)
        return ring_rank if data == self.data_rank else None

    def global_rank_in_sequence(self, sequence_rank: int) -> int:
        """World rank of another member of this rank's sequence; the index wraps around."""
        ring_rank, ulysses_rank = divmod(sequence_rank % self.sequence_size, self.ulysses_size)
        return self.grid.global_rank(self.data_rank, ring_rank, ulysses_rank)

    def describe(self, sequence_rank: int) -> str:
        """Name a member of this rank's sequence for messages."""
        ring_rank, ulysses_rank = divmod(sequence_rank, self.ulysses_size)
        place = f"ring rank {ring_rank}"
        if self.ulysses_size > 1:
            place += f", Ulysses rank {ulysses_rank}"
        if self.sequence_size == self.grid.world_size == self.ring_size:
            return place
        return f"{place} (rank {self.global_rank_in_sequence(sequence_rank)} of the world)"


def _warm_up(group: ProcessGroup | None) -> None:
    """NCCL connects at a group's first call, which all its ranks must make; a hop may have messages of a few.

    (Written for NCCL, not run so far: no GPU was at hand.)
    """
    if group is not None and dist.get_backend(group) == "nccl":
        dist.all_reduce(torch.zeros(1, device=torch.device("cuda", torch.cuda.current_device())), group=group)


def _my_group(
    groups: list[list[int]], timeout: datetime.timedelta, backend: str | None
) -> ProcessGroup | None:
    """Create all groups (torch wants every rank to take part) and return the one this rank is in."""
    if len(groups[0]) == 1:
        return None
    mine: ProcessGroup | None = None
    for ranks in groups:
        group = dist.new_group(ranks, timeout=timeout, backend=backend)
        if dist.get_rank() in ranks:
            mine = group
    return mine
