"""Make the process groups of a mesh: ring, Ulysses, sequence, data, and one for headers.

Owns the calls of `torch.distributed.new_group`, which all ranks of the world make in the same order, and the
check before the first one that they mean the same groups.
"""

from __future__ import annotations

import datetime
import inspect
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from ds_ring.errors import RingMeshError, RingMismatchError, shown
from ds_ring.schedule.grid import Grid


class Groups(NamedTuple):
    """Hold this rank's groups; None where a group would have one rank. See `RingMesh` for what each is."""

    ring_group: ProcessGroup | None
    ulysses_group: ProcessGroup | None
    sequence_group: ProcessGroup | None
    data_group: ProcessGroup | None
    cpu_group: ProcessGroup | None


def world_size_for(caller: str) -> int:
    """Return the number of ranks, or refuse a process without a process group."""
    if not dist.is_available() or not dist.is_initialized():
        raise RingMeshError(
            f"RingMesh.{caller}: expected a process group, got none: torch.distributed is not"
            " initialised; start with the deepspeed launcher or torchrun, and call"
            " torch.distributed.init_process_group (or ds_ring.initialize) first"
        )
    return dist.get_world_size()


def check_seconds(value: object, name: str) -> None:
    """Refuse what is no number of seconds that a timer takes."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1e8:
        raise RingMeshError(f"{name}: expected seconds above 0, at most 1e8, got {shown(value)}")


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
            raise RingMeshError(
                f"expected groups in the order of the world with torch {torch.__version__}, which sorts the"
                f" ranks of a group, got {unsorted}; sort them, or use torch 2.13"
            )
    # In the same order on every rank of the world: torch matches the calls of new_group by order.
    sequence = _my_group(grid.sequence_groups(), timeout, None)
    speaks_gloo = sequence is None or dist.get_backend(sequence) in ("gloo", "fake")
    ring = _my_group(grid.ring_groups(), timeout, None)
    ulysses = _my_group(grid.ulysses_groups(), timeout, None)
    data = _my_group(grid.data_groups(), timeout, None)
    # Headers are CPU tensors, which NCCL does not take.
    cpu = sequence if speaks_gloo else _my_group(grid.sequence_groups(), timeout, "gloo")
    _connect(ring)
    return Groups(ring, ulysses, sequence, data, cpu)


def sequences_of(
    device_mesh: DeviceMesh, ring_dim: str, ulysses_dim: str | None
) -> tuple[list[list[int]], int]:
    """Return the ranks of every sequence of a device mesh, and its Ulysses size.

    Arguments as of `RingMesh.from_device_mesh`.

    Raises:
        RingMeshError: it is no DeviceMesh, or has no such dimensions.
    """
    inner = [ring_dim] if ulysses_dim is None else [ring_dim, ulysses_dim]
    names = list(device_mesh.mesh_dim_names or ()) if isinstance(device_mesh, DeviceMesh) else []
    if not set(inner) <= set(names) or len(set(inner)) < len(inner):
        raise RingMeshError(
            f"device_mesh: expected a DeviceMesh with the dimensions {inner}, got"
            f" {shown(names or device_mesh)}; name them by mesh_dim_names of init_device_mesh"
        )
    # To [sequences, ring x Ulysses], the Ulysses dimension fastest: ring_rank * ulysses_size + ulysses_rank.
    ranks, outer = device_mesh.mesh, [name for name in names if name not in inner]
    ranks = ranks.permute([names.index(name) for name in [*outer, *inner]]).flatten(-len(inner))
    ulysses_size = 1 if ulysses_dim is None else device_mesh.mesh.shape[names.index(ulysses_dim)]
    return ranks.reshape(-1, ranks.shape[-1]).tolist(), ulysses_size


def _check_same(grid: Grid) -> None:
    """Compare the grids of all ranks: different ones would wait for each other in different groups."""
    if grid.world_size == 1 or dist.get_backend() == "fake":
        return
    grids: list[Grid | None] = [None] * grid.world_size
    dist.all_gather_object(grids, grid)
    other = next((rank for rank, theirs in enumerate(grids) if theirs != grids[0]), None)
    if other is not None:
        raise RingMismatchError(
            f"expected the same groups on all ranks, got {_named(grids[0])} on rank 0 and"
            f" {_named(grids[other])} on rank {other}; make the mesh with the same arguments everywhere"
        )


def _named(grid: Grid | None) -> str:
    assert grid is not None
    order = f", order {list(grid.order)}" if grid.order else ""
    return f"ring_size {grid.ring_size}, ulysses_size {grid.ulysses_size}{order}"


def _my_group(
    groups: list[list[int]], timeout: datetime.timedelta, backend: str | None
) -> ProcessGroup | None:
    """Create all groups (torch wants every rank to take part) and return the one this rank is in."""
    if len(groups[0]) == 1:
        return None
    mine: ProcessGroup | None = None
    for ranks in groups:
        options: dict[str, Any] = {} if ranks == sorted(ranks) else _UNSORTED
        group = dist.new_group(ranks, timeout=timeout, backend=backend, **options)
        if dist.get_rank() in ranks:
            mine = group
    return mine


def _connect(group: ProcessGroup | None) -> None:
    """Connect an NCCL group, by a first call that all its ranks make; a hop may have messages of a few only.

    (Written for NCCL, not run so far: no GPU was at hand.)
    """
    if group is not None and dist.get_backend(group) == "nccl":
        dist.all_reduce(torch.zeros(1, device=torch.device("cuda", torch.cuda.current_device())), group=group)
