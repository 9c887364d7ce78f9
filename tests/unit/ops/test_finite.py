"""`FiniteKernel` names the hop, or the stage, whose results are not finite."""

from __future__ import annotations

import pytest
import torch

from ds_ring import Full, build_plan, make_layout
from ds_ring.errors import RingFiniteError
from ds_ring.kernels.reference import ReferenceKernel
from ds_ring.ops.passes import FiniteKernel
from ds_ring.schedule.lowering import kernel_calls


@pytest.mark.parametrize(
    ("options", "calls"), [({}, 4), ({"stage_shards": 3}, 2), ({"ranks_per_node": 2}, 4)]
)
def test_the_hop_is_named_forward_and_backward(options: dict[str, int], calls: int) -> None:
    plan = build_plan(Full(), make_layout("contiguous", tokens=16, ring_size=4), **options).rank(1)
    kernel = FiniteKernel(ReferenceKernel(), plan).of_heads(slice(0, 1))
    tables = [step.tiles for step in kernel_calls(plan.classes[0], backward=False)]
    assert len(tables) == calls and kernel.name == "reference"
    for hop, tiles in enumerate(tables):
        q, k = torch.ones(1, 1, 4, 8), torch.ones(1, 1, int(tiles.k.slot.max() + tiles.k.length.max()), 8)
        (part, *_) = kernel.forward(q, k, k, tiles, 1.0)
        assert part.out_BHSD.isfinite().all()
        with pytest.raises(RingFiniteError, match=f"in out of ring rank 1 after hop {hop}"):
            list(kernel.forward(q, k, k * torch.inf, tiles, 1.0))
        lse = torch.zeros(1, 1, 4)
        with pytest.raises(RingFiniteError, match=f"in dq of ring rank 1 after hop {hop}"):
            list(kernel.backward(q * torch.inf, q, k, k, q, lse, tiles, 1.0))
