"""Make smaller rings from the ranks of a ring, for samples that do not need all of its ranks.

Owns their process groups. `schedule/sub_rings.py` decides which ranks form which ring for a batch.
"""

from __future__ import annotations

import datetime
import functools
from dataclasses import replace
from typing import Any

from ds_ring.errors import RingMeshError
from ds_ring.health.guarded_call import call_guarded
from ds_ring.runtime.mesh import RingMesh
from ds_ring.runtime.process_groups import make_groups
from ds_ring.schedule.grid import Grid, divisors

_FIRST_STEP = 3  # of the guarded calls: those before are the start's (config_agreement.py, mesh.py)


def make_sub_rings(mesh: RingMesh, timeout_s: float = 1800.0) -> dict[int, RingMesh]:
    """Return this rank's ring of every size that divides the ring of `mesh`, itself included. Collective.

    A smaller ring is a block of consecutive ring ranks. All of them share the failure detector, buffers, host
    memory and traces of `mesh`, and are closed with it. Each has its own plans and its own counter of calls.
    Only one is used at a time.

    Raises:
        RingMeshError: Ulysses ranks share a sequence, whose heads smaller groups could not split alike.
        RingPeerError: another rank failed meanwhile.
    """
    if mesh.ulysses_size > 1:
        raise RingMeshError(
            f"make_sub_rings: expected no Ulysses ranks, got ulysses_size {mesh.ulysses_size}; set it to 1"
        )
    shared: dict[str, Any] = {
        "watch": mesh.watch,
        "buffers": mesh.buffers,
        "host_memory": mesh.host_memory,
        "traces": mesh.traces,
        "use": mesh.use,
    }
    timeout, found = datetime.timedelta(seconds=timeout_s), {mesh.ring_size: mesh}
    for step, size in enumerate(divisors(mesh.ring_size)[:-1], start=_FIRST_STEP):
        if size == 1:
            found[1] = replace(RingMesh.single(), **shared | {"watch": None})
            continue
        grid = Grid(mesh.grid.world_size, size, 1, mesh.grid.order)
        what = f"the making of the process groups of rings of {size}"
        make = functools.partial(make_groups, grid, timeout)
        groups = call_guarded(make, mesh.watch, grid, what, step, timeout_s)
        more: dict[str, Any] = {**shared, "ranks_per_node": mesh.ranks_per_node}
        found[size] = RingMesh(grid, mesh.global_rank, *groups, **more)
    return found
