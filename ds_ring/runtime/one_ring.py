"""See a mesh of ring x Ulysses ranks as one ring over all of them.

Owns that view, which has no process groups of its own. For calls in which nobody splits heads: replicated
queries over a sharded cache.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict

import torch
import torch.distributed as dist

from ds_ring.runtime.exchange import Exchange
from ds_ring.runtime.mesh import RingMesh
from ds_ring.schedule.grid import Grid


def one_ring(mesh: RingMesh) -> RingMesh:
    """Return a mesh whose ring is the whole sequence group of `mesh`, in order. Collective in the sequence.

    It shares the groups, the failure detector and the count of calls of `mesh`; it has plans of its own, and
    is not traced. Use one of the two at a time.
    """
    grid = Grid(mesh.grid.world_size, mesh.sequence_size, 1, mesh.grid.order)
    found = dataclasses.replace(
        mesh, grid=grid, ring_group=mesh.sequence_group, ulysses_group=None, contexts=OrderedDict(), traces=[]
    )
    group = found.ring_group
    if mesh.ulysses_size > 1 and group is not None and dist.get_backend(group) == "nccl":
        # NCCL connects in the first call, which all ranks must make; a hop may have messages of a few only.
        Exchange(found).all_reduce(torch.zeros(1, device="cuda"), group)
    return found
