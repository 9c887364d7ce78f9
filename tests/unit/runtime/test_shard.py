"""Shards of another ring than the mesh's."""

from __future__ import annotations

import pytest
import torch

from ds_ring import RingLayoutError, RingMesh, gather_sequence, make_layout, shard_sequence


def test_a_layout_of_another_ring_is_refused() -> None:
    """Also where a shard of it has as many tokens as the tensor."""
    mesh, layout = RingMesh.single(), make_layout("contiguous", tokens=8, ring_size=2)
    for call, tokens in ((gather_sequence, 4), (shard_sequence, 8)):
        with pytest.raises(RingLayoutError, match=r"expected a layout for 1 ranks .*got one for 2"):
            call(torch.zeros(tokens, 3), layout, mesh=mesh, dim=0)
