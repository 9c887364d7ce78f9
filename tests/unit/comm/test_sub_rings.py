"""Smaller rings of a ring's ranks: who is in them, and what they share with the whole one."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from ds_ring.comm import mesh as mesh_module
from ds_ring.comm.mesh import RingMesh
from ds_ring.comm.owners import CallCounter
from ds_ring.errors import RingMeshError
from ds_ring.memory.host_memory import HostMemory
from ds_ring.ops.context import ContextCache
from ds_ring.ring.observer import Observers
from ds_ring.ring.pool import Buffers
from ds_ring.schedule.grid import Grid


def test_smaller_rings_are_blocks_of_the_whole_one_and_share_what_it_keeps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two rings of four in an order of their own; checkpoints of small rings go to the host, too."""
    asked: list[Grid] = []

    def make_groups(grid: Grid, timeout: Any) -> tuple[Any, ...]:
        asked.append(grid)
        return ("ring", "ulysses", "sequence", "data", "cpu")

    monkeypatch.setattr(mesh_module, "make_groups", make_groups)
    order = (4, 5, 6, 7, 0, 1, 2, 3)
    for rank in range(8):
        mesh = RingMesh(Grid(8, 4, 1, order), rank, ranks_per_node=2)
        found = mesh_module.make_sub_rings(mesh)
        assert found.keys() == {1, 2, 4} and found[4] is mesh
        for size, one in found.items():
            assert one.ring_size == size and one.ring_rank == mesh.ring_rank % size
            for name in ("state", "timeouts"):
                assert getattr(one, name) is getattr(mesh, name), (size, name)
            for kind in (Buffers, HostMemory, Observers):
                assert one.owners[kind] is mesh.owners[kind], (size, kind)
            for kind in (CallCounter, ContextCache):
                assert (one.owners[kind] is mesh.owners[kind]) == (one is mesh), (size, kind)
        assert found[2].ranks_per_node == 2 and found[2].ring_group == "ring"
        assert found[1].ring_group is None and found[1].detector is None
    assert set(asked) == {Grid(8, 2, 1, order)}


def test_ulysses_ranks_are_refused() -> None:
    with pytest.raises(RingMeshError, match="expected no Ulysses ranks, got ulysses_size 2"):
        mesh_module.make_sub_rings(RingMesh(Grid(4, 2, 2), 0))


def test_a_mesh_has_few_fields() -> None:
    """What calls and caches need has owners of its own (`comm/owners.py`)."""
    assert len(fields(RingMesh)) <= 12
