"""`ds-ring plan` against the profiler: planned peak memory within 5 % of what real ranks allocate.

Some of the points of `tools/check_plan.py`, which has more and larger ones.
"""

from __future__ import annotations

import gc

import pytest

from ds_ring_launcher.plan.model_file import ModelShape
from tests.dist.deepspeed_ranks import start_deepspeed
from tools.check_plan import CheckedSetting, PeakAndTraffic, attention_rank, planned, training_rank

MODEL = ModelShape(3, 128, 4, 2, 64, 384, 2048)

POINTS = [
    CheckedSetting(2, 4096, 8, 8, "float32", "causal"),
    CheckedSetting(4, 4096, 8, 4, "bfloat16", "causal"),
    CheckedSetting(2, 1024, 4, 2, "float32", "causal", 1, MODEL),
    CheckedSetting(2, 1024, 4, 2, "bfloat16", "window", 2, MODEL),
    CheckedSetting(2, 1024, 4, 2, "bfloat16", "causal", 1, MODEL, steps=2),
    CheckedSetting(2, 64, 4, 2, "bfloat16", "causal", 2, MODEL, fused=True),
    CheckedSetting(2, 64, 4, 2, "bfloat16", "causal", 3, MODEL, fused=True, sub_group=600_000),
    CheckedSetting(2, 256, 4, 2, "bfloat16", "causal", 3, MODEL, start="partitioned"),
    CheckedSetting(2, 256, 4, 2, "float32", "causal", 3, MODEL, start="whole"),
]


def measured(rank: int, world_size: int, point: CheckedSetting) -> PeakAndTraffic:
    if point.stage is None:
        return attention_rank(point)
    start_deepspeed()
    gc.collect()  # what an earlier engine leaves would be freed meanwhile
    return training_rank(point)


@pytest.mark.day(
    "attention P=4 T=4096 H8 G4 bfloat16 causal", "zero3 start partitioned P=2 T=256 H4 G2 bfloat16 causal"
)
@pytest.mark.parametrize("point", POINTS, ids=lambda point: point.name)
def test_the_planned_peak_is_the_measured_one(rank_pool, point):
    ranks = rank_pool(point.ranks).run(measured, point, timeout_s=120)
    plan = planned(point)
    assert plan.peak == pytest.approx(max(result.peak for result in ranks), rel=0.05)
    if point.stage is None:
        assert plan.sent == max(result.sent for result in ranks)
