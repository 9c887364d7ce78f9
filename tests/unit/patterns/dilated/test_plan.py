"""Plans, layouts and printed schedules of dilated patterns."""

from __future__ import annotations

import numpy as np
import pytest

from ds_ring import Dilated, RingLayoutError, build_plan, make_layout
from ds_ring.kernels.flex.layouts import count_fullest_pairs
from ds_ring.kernels.select import get_block_side
from ds_ring.measure.schedule_text import format_schedule
from ds_ring.patterns.dilated.residue_layout import for_blocks
from ds_ring.plugin import FAST_KERNELS, KERNELS
from ds_ring.schedule.choose import bind_one_head
from ds_ring.schedule.head_class import HeadClass
from ds_ring.schedule.lowering import lower_pass
from tests.cases import longnet
from tests.unit.kernels.flex.test_flex import executed
from tests.unit.schedule.test_plan import attended


@pytest.mark.parametrize(("rule", "classes"), [("zero", 1), ("paper_kv", 4), ("paper", 4)])
def test_heads_that_are_read_alike_go_together(rule: str, classes: int) -> None:
    pattern = Dilated((16, 64), (1, 4), True, rule)
    plan = build_plan(pattern, make_layout("contiguous", tokens=256, ring_size=4), query_heads=8, kv_heads=8)
    assert len(plan.classes) == classes
    heads = [head for head_class in plan.classes for head in range(8)[head_class.kv_heads]]
    assert sorted(heads) == list(range(8))
    per_class = [
        head_class.tokens_sent(range(4)) * len(range(8)[head_class.kv_heads]) for head_class in plan.classes
    ]
    assert plan.tokens_sent == sum(per_class)


def test_what_must_cross_is_each_token_once_for_each_other_rank_that_reads_it() -> None:
    pattern, layout = Dilated((16, 64), (1, 4), False, "zero"), make_layout("zigzag", tokens=96, ring_size=4)
    (head_class,) = build_plan(pattern, layout).classes
    assert isinstance(head_class, HeadClass)
    for origin in range(4):
        local = layout.positions(origin)
        reads = [attended(pattern, 0, layout.positions(r), local).any(0) for r in range(4) if r != origin]
        assert head_class.tokens_needed(origin) == np.sum(reads)


def test_parts_that_are_put_together_are_shown() -> None:
    """Where a rank reads more than its neighbour does, the rest comes from the owner itself."""
    pattern = Dilated((64, 256), (1, 4), causal=True)
    plan = build_plan(pattern, make_layout("zigzag", tokens=256, ring_size=8))
    texts = [format_schedule(lower_pass(plan.rank(rank).classes, 1, backward=False)) for rank in range(8)]
    assert any("b7 = b5" in text or " = b" in text for text in texts)


@pytest.mark.night
def test_sampled_rows_stand_for_all() -> None:
    pattern = longnet(1 << 14, 256)
    for name in ("contiguous", "residue"):
        layout = make_layout(name, tokens=1 << 14, ring_size=4, pattern=pattern)
        counted = count_fullest_pairs(bind_one_head(pattern), layout, 32)  # 128 rows a shard
        assert counted == pytest.approx(executed(pattern, layout, 32), rel=0.1)


@pytest.mark.night
def test_longnet_on_flex_and_on_kernels_that_compute_pairs() -> None:
    """At blocks of 128: one executes what the tables of blocks hold, and gets another layout for it."""
    pattern = longnet(1 << 15)
    sizes = {"tokens": 1 << 15, "ring_size": 8, "pattern": pattern}
    exact, blocks = make_layout("auto", **sizes), make_layout("auto", **sizes, block_size=128)
    assert exact.name in ("contiguous", "zigzag", "balanced") and blocks.name == "residue"
    assert executed(pattern, blocks, 128) < 0.6 * executed(pattern, exact, 128)


def test_the_side_goes_by_the_kernel() -> None:
    assert FAST_KERNELS["cuda"] == "flex" and KERNELS["flex"].takes_blocks
    pattern = (Dilated((8, 16), (1, 2)),)
    assert [get_block_side(name, "cuda", pattern, 64) for name in ("auto", "flex", "flash", "reference")] == [
        *(64, 64, 1, 1)
    ]
    assert get_block_side("auto", "cpu", pattern, 64) == 1


def test_rates_that_repeat_beyond_the_smallest_segment_have_no_residue_layout() -> None:
    with pytest.raises(RingLayoutError, match="repeat after 15 tokens, more than the smallest segment 4"):
        make_layout("residue", tokens=64, ring_size=2, pattern=Dilated((4, 32), (3, 5)))
    assert for_blocks(64, 2, 1, [(Dilated((4, 32), (3, 5)), 1)]) == []


@pytest.mark.parametrize(("tokens", "layouts"), [(8192, 2), (16384, 0)])
def test_auto_takes_no_residue_layout_of_too_many_runs(tokens: int, layouts: int) -> None:
    """Four runs a window of 16 tokens: 1,024 a shard of 4,096 tokens."""
    assert len(for_blocks(tokens, 2, 1, [(Dilated((16, 64), (1, 4)), 1)]) or []) == layouts
