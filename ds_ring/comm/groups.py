"""Make the process groups of a mesh: ring, Ulysses, sequence, data, and one for headers.

Owns the calls of `torch.distributed.new_group`, which all ranks of the world make in the same order, and the
check before the first one that they mean the same groups.
"""

from __future__ import annotations

import datetime
import inspect
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from ds_ring.errors import RingMeshError, RingMismatchError, shown
from ds_ring.health.whereabouts import get_group_names
from ds_ring.limits import MAX_SECONDS
from ds_ring.plugin import DEVICES, load
from ds_ring.schedule.grid import Grid

# Of torch's own waits: every wait of ds_ring has a limit of its own, which torch's must not cut short.
NO_LIMIT = datetime.timedelta(seconds=MAX_SECONDS)


class Groups(NamedTuple):
    """Hold this rank's groups; None where a group would have one rank. See `RingMesh` for what each is."""

    ring_group: ProcessGroup | None
    ulysses_group: ProcessGroup | None
    sequence_group: ProcessGroup | None
    data_group: ProcessGroup | None
    cpu_group: ProcessGroup | None


def compute_world_size(caller: str) -> int:
    """Return the number of ranks, or refuse a process without a process group."""
    if not dist.is_available() or not dist.is_initialized():
        got, advice = "none: torch.distributed is not initialised", "call init_process_group first"
        raise RingMeshError.wrong(f"RingMesh.{caller}", "a process group", got, advice)
    return dist.get_world_size()


def gather_objects(value: object, group: ProcessGroup | None = None) -> list[Any]:
    """Return the value of each rank of a group, or of the world, which are pickled. Collective."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def check_seconds(value: object, name: str) -> None:
    """Raise RingMeshError unless `value` is a number of seconds above 0 that timers accept."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= MAX_SECONDS:
        expected = f"seconds above 0, at most {MAX_SECONDS:g}"
        raise RingMeshError.wrong(name, expected, shown(value), "pass a number of seconds")


# torch sorts the ranks of a group otherwise, and gathers in that order: the ring's own would be lost.
_UNSORTED: dict[str, Any] = {"sort_ranks": False}


def make_groups(grid: Grid, timeout: datetime.timedelta) -> Groups:
    """Make this rank's groups. Collective over the world.

    Raises:
        RingMismatchError: ranks ask for different groups; raised on every rank.
        RingMeshError: groups out of the world's order, which this release of torch would sort.
    """
    _check_same(grid)
    if grid.order and "sort_ranks" not in inspect.signature(dist.new_group).parameters:
        groups = [*grid.ring_groups(), *grid.ulysses_groups(), *grid.sequence_groups(), *grid.data_groups()]
        unsorted = next((ranks for ranks in groups if ranks != sorted(ranks)), None)
        if unsorted:
            expected = f"groups in the order of the world (torch {torch.__version__} sorts their ranks)"
            raise RingMeshError.wrong("ranks", expected, str(unsorted), "sort them, or use torch 2.13")
    # In the same order on every rank of the world: torch matches the calls of new_group by order.
    sequence = _make_group(grid.sequence_groups(), timeout, None)
    speaks_gloo = sequence is None or dist.get_backend(sequence) in ("gloo", "fake")
    # Transfers that overlap with attention are urgent.
    ring = _make_group(grid.ring_groups(), timeout, None, urgent=True)
    ulysses = _make_group(grid.ulysses_groups(), timeout, None, urgent=True)
    data = _make_group(grid.data_groups(), timeout, None)
    # Headers are CPU tensors, which NCCL does not take.
    cpu = sequence if speaks_gloo else _make_group(grid.sequence_groups(), timeout, "gloo")
    nccl = [group for group in (sequence, ring, ulysses, data) if group is not None and _is_nccl(group)]
    if nccl and "cuda" in DEVICES:
        load(DEVICES["cuda"].warm_up)(nccl)
    return Groups(ring, ulysses, sequence, data, cpu)


def _is_nccl(group: ProcessGroup) -> bool:
    return dist.get_backend(group) != "fake" and "nccl" in str(dist.get_backend_config(group))


def destroy_groups(groups: Iterable[ProcessGroup | None], only_local: bool = False) -> None:
    """Destroy groups that `make_groups` has made.

    With `only_local` those of NCCL, which all ranks destroy together, are left alone.
    """
    for group in {id(group): group for group in groups if group is not None}.values():
        # Without a name it is gone: with the default group, or by somebody else.
        if get_group_names([group]) and not (only_local and "nccl" in str(dist.get_backend_config(group))):
            dist.destroy_process_group(group)


def _check_same(grid: Grid) -> None:
    """Compare the grids of all ranks: different ones would wait for each other in different groups."""
    if grid.world_size == 1 or dist.get_backend() == "fake":
        return
    grids: list[Grid] = gather_objects(grid)
    different_rank = next((rank for rank, theirs in enumerate(grids) if theirs != grids[0]), None)
    if different_rank is not None:
        first, different = _describe_grid(grids[0]), _describe_grid(grids[different_rank])
        got = f"{first} on rank 0 and {different} on rank {different_rank}"
        advice = "make the mesh with the same arguments everywhere"
        raise RingMismatchError.wrong("RingMesh", "the same groups on all ranks", got, advice)


def _describe_grid(grid: Grid) -> str:
    order = f", order {list(grid.order)}" if grid.order else ""
    return f"ring_size {grid.ring_size}, ulysses_size {grid.ulysses_size}{order}"


def _make_group(
    groups: list[list[int]], timeout: datetime.timedelta, backend: str | None, urgent: bool = False
) -> ProcessGroup | None:
    """Create all groups (torch wants every rank to take part) and return the one this rank is in."""
    if len(groups[0]) == 1:
        return None
    mine: ProcessGroup | None = None
    for ranks in groups:
        unsorted_options: dict[str, Any] = {} if ranks == sorted(ranks) else dict(_UNSORTED)
        if urgent and "nccl" in str(dist.get_backend_config()):
            # torch changes the options, so each group has its own. A stream of high priority goes first where
            # a multiprocessor is free. A persistent kernel leaves no cluster of neighbouring ones free:
            # [Note: multiprocessors for messages] in `kernels/flash/packages.py`. The environment's
            # NCCL_CGA_CLUSTER_SIZE has precedence in NCCL.
            options: Any = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
            options.config.cga_cluster_size = 1
            options._timeout = timeout  # new_group warns of any other
            unsorted_options["pg_options"] = options
        group = dist.new_group(ranks, timeout=timeout, backend=backend, **unsorted_options)
        if dist.get_rank() in ranks:
            mine = group
    return mine
