"""Keys that travel in float8 between real ranks: bytes, errors, the first batch's tolerance, what is refused."""

from __future__ import annotations

import pytest
import torch

from ds_ring import Causal, build_plan, make_layout
from ds_ring_launcher.plan.pass_memory import PassShape
from ds_ring_launcher.plan.pass_time import CostPart, bytes_sent
from tests.dist.harness import Pool
from tests.dist.test_first_batch import train
from tests.dist.test_precision import SHAPE, passed_in


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.day("4")
def test_keys_travel_in_float8(rank_pool: Pool, size: int) -> None:
    """A byte an element and two a row; gradients travel as before. The error is that of rounding keys."""
    exact, rounded = (
        rank_pool(size).run(passed_in, torch.bfloat16, {"kv_payload": payload})
        for payload in ("as_is", "float8")
    )
    for item, second in zip(exact[0][0], rounded[0][0], strict=True):
        gap = float((item.double() - second.double()).norm() / item.double().norm())
        assert 0.005 < gap < 0.15, gap
    sent = [[sum(item[i] for item in ranks) for i in (1, 2)] for ranks in (exact, rounded)]
    (keys, back), (short, short_back) = sent
    row = 2 * SHAPE.head_dim
    assert short * 2 * row == keys * (row + 2) and back - keys == short_back - short
    layout = make_layout("zigzag", tokens=SHAPE.tokens, ring_size=size)
    heads = {"query_heads": SHAPE.query_heads, "kv_heads": SHAPE.kv_heads}
    plan = build_plan(Causal(), layout, kv_payload="float8", **heads)
    group = SHAPE.query_heads // SHAPE.kv_heads
    shape = PassShape(SHAPE.batch, group, layout.local_tokens, SHAPE.head_dim, 2, 1 << 20, "cpu")
    for rank, (_, *counted) in enumerate(rounded):
        classes = [CostPart(item, 1) for item in plan.rank(rank).classes]
        assert bytes_sent(classes, shape) == tuple(counted), "as ds-ring plan says"


def test_keys_in_float8_have_a_tolerance_of_their_own(rank_pool: Pool) -> None:
    plain, rounded = (
        rank_pool(2).run(train, 1, {"kv_payload": payload, "verify_first_batch": True})
        for payload in ("as_is", "float8")
    )
    for (exact, *_), (losses, *_) in zip(plain, rounded, strict=True):
        assert exact != losses and exact == pytest.approx(losses, rel=1e-3)
