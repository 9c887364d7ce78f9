"""LongNet's calls for flash: the slots of a table as few runs, and soon."""

from __future__ import annotations

import time

import numpy as np
import pytest

from ds_ring import Dilated, Documents, SlidingWindow, build_plan, make_layout
from ds_ring.kernels.flash import calls as make_flash_calls
from ds_ring.masks.pattern import Pattern
from ds_ring.masks.tiles import Axis, Tiles
from ds_ring.schedule.choose import bind_one_head
from tests.cases import longnet

IDS = np.repeat(np.arange(5), [300, 100, 424, 100, 100])
CASES: dict[str, Pattern] = {
    "causal": longnet(1024, 64),
    "both ways": longnet(1024, 64, 2, False),
    "growth 4, window": longnet(1024, 32, 4) & SlidingWindow(700),
    "documents": longnet(1024, 64) & Documents(IDS),
    "not nested": Dilated((75, 210), (3, 5), False),
}


def tables(pattern: Pattern, layout_name: str) -> list[Tiles]:
    layout = make_layout(layout_name, tokens=1024, ring_size=2, pattern=pattern)
    plan = build_plan(pattern, layout, query_heads=4, kv_heads=2)
    classes = (one for rank in range(2) for one in plan.rank(rank).classes)
    return [hop.tiles for one in classes for hop in one.hops if len(hop.tiles)]


def places(axis: Axis) -> dict[int, int]:
    """Position by slot."""
    columns = (axis.slot, axis.slot_step, axis.position, axis.position_step, axis.length)
    rows = np.stack(columns, axis=1).tolist()
    return {s + i * ds: p + i * dp for s, ds, p, dp, n in rows for i in range(n)}


@pytest.mark.night
@pytest.mark.parametrize("layout_name", ["contiguous", "zigzag", "striped", "balanced"])
@pytest.mark.parametrize("name", CASES)
def test_arithmetic_agrees_with_the_tiles(name: str, layout_name: str, monkeypatch) -> None:
    for tiles in tables(CASES[name], layout_name):
        for axis in (tiles.q, tiles.k):
            quick = make_flash_calls._find_runs(axis)
            with monkeypatch.context() as patch:
                patch.setattr(make_flash_calls, "_merge_rows", lambda rows: None)
                slow = make_flash_calls._find_runs(axis)
            assert places(quick) == places(slow) == places(axis)


@pytest.mark.day("causal")
@pytest.mark.parametrize("name", CASES)
def test_a_part_of_a_table_keeps_its_pairs(name: str) -> None:
    """The branches are not cut anew where the runs of both sides have pairs that the table has not."""
    for tiles in tables(CASES[name], "zigzag"):
        part = tiles.rows(np.arange(len(tiles)) != len(tiles) // 2)
        rewritten = make_flash_calls.get_branch_form(part), make_flash_calls._split_classes(part)
        assert len({int((form.pairs * form.multiplicity).sum()) for form in rewritten}) == 1


def test_branches_of_many_runs_are_not_cut_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pair of runs would be a rectangle."""
    runs = np.stack([np.arange(0, 64, 8), np.ones(8, int), np.full(8, 4)], axis=1)
    tiles = Dilated((16, 64), (1, 2)).tiles(runs, runs)
    anew = make_flash_calls._cut_anew(tiles)
    assert anew is not None
    monkeypatch.setattr(make_flash_calls, "MANY_RUNS", 7)
    assert make_flash_calls._cut_anew(tiles) is None
    forms = anew, make_flash_calls.get_branch_form(tiles)
    assert len({int((form.pairs * form.multiplicity).sum()) for form in forms}) == 1


def test_a_table_of_a_long_shard_is_soon_done() -> None:
    """17 to 26 ms of a core at 256 Ki a shard, where it took 130; the bound is for a busy machine."""
    tokens = 1 << 21
    pattern, seconds = bind_one_head(longnet(tokens)), []
    plan = build_plan(pattern, make_layout("zigzag", tokens=tokens, ring_size=8))
    tiles = plan.rank(0).classes[0].hops[0].tiles
    for _ in range(5):
        before = time.process_time()
        calls = make_flash_calls.make_flash_calls.__wrapped__(tiles)
        seconds.append(time.process_time() - before)
    assert len(calls) <= 12 and min(seconds) < 0.08
