"""Layouts are bijections, padding lies at the end of a shard, and `auto` keeps its promises."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from itertools import product
from typing import Any

import numpy as np
import pytest

from ds_ring import Causal, Full, RingShapeError, SlidingWindow, build_plan, make_layout
from ds_ring.errors import RingLayoutError
from ds_ring.masks.pattern import Pattern
from ds_ring.schedule import layout as layout_module
from ds_ring.schedule.choose import (
    EVEN,
    bind_one_head,
    choose_best,
    compute_costs,
    count_rank_work,
    rated,
    timed,
)
from ds_ring.schedule.layout import ChunkLayout, Layout
from ds_ring.schedule.pieces import PieceLayout, whole_blocks
from ds_ring.schedule.plan import find_head_classes
from tests.cases import LAYOUTS, LONG_PATTERNS, layout_for, longnet, rows_of

(PATTERN,) = rows_of("Dilated", lambda dilated: {"": dilated((12, 40), (1, 3))}).values() or (Causal(),)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("tokens", [1, 5, 16, 17, 1000, 1023])
@pytest.mark.parametrize("ring_size", [1, 2, 3, 8])
@pytest.mark.parametrize("multiple_of", [1, 4])
def test_every_position_has_one_slot(name: str, tokens: int, ring_size: int, multiple_of: int) -> None:
    layout = layout_for(name, PATTERN, tokens=tokens, ring_size=ring_size, multiple_of=multiple_of)
    shards = [layout.positions(rank) for rank in range(ring_size)]
    assert {len(shard) for shard in shards} == {layout.local_tokens}
    assert layout.local_tokens % multiple_of == 0
    everything = np.concatenate(shards)
    np.testing.assert_array_equal(np.sort(everything[everything >= 0]), np.arange(tokens))
    np.testing.assert_array_equal(everything[layout.slots_by_position()], np.arange(tokens))
    for rank, shard in enumerate(shards):
        valid = layout.valid_tokens(rank)
        assert (shard[:valid] >= 0).all() and (shard[valid:] == -1).all()
    waste = layout.local_tokens * ring_size - tokens
    if name in ("contiguous", "zigzag", "striped"):
        assert waste < ring_size * (multiple_of + (2 if name == "zigzag" else 1))
    else:  # whole windows, or pieces as uneven as the work asks for
        assert waste < ring_size * (multiple_of + 2 * 12) + 0.1 * tokens


@pytest.mark.parametrize(
    ("name", "shards"),
    [
        ("zigzag", [[0, 1, 2, 3, 12, 13, 14, 15], [4, 5, 6, 7, 8, 9, 10, 11]]),  # pairs of mirrored chunks
        ("striped", [[0, 3, 6], [1, 4, -1], [2, 5, -1]]),  # dealt out
    ],
)
def test_a_layout_has_each_token_in_its_place(name: str, shards: list[list[int]]) -> None:
    layout = make_layout(name, tokens=16 if name == "zigzag" else 7, ring_size=len(shards))
    assert [layout.positions(rank).tolist() for rank in range(len(shards))] == shards


def test_auto_follows_the_pattern() -> None:
    assert make_layout("auto", tokens=64, ring_size=4, pattern=Causal()).name == "zigzag"
    assert make_layout("auto", tokens=64, ring_size=4, pattern=Full()).name == "contiguous"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"name": "zickzack", "tokens": 8, "ring_size": 2}, "contiguous.*zigzag.*got 'zickzack'"),
        ({"name": "zigzag", "tokens": 0, "ring_size": 2}, "tokens: expected a positive integer, got 0"),
        ({"name": "zigzag", "tokens": 8.0, "ring_size": 2}, "tokens: .* got 8.0"),
        ({"name": "zigzag", "tokens": 8, "ring_size": -1}, "ring_size: .* got -1"),
        ({"name": "zigzag", "tokens": 8, "ring_size": True}, "ring_size: .* got True"),
    ],
)
def test_layouts_that_cannot_be(arguments: dict[str, object], said: str) -> None:
    with pytest.raises(RingLayoutError, match=said):
        make_layout(**arguments)  # type: ignore[arg-type]


def test_shards_that_ulysses_ranks_cannot_share_are_refused() -> None:
    layout = make_layout("zigzag", tokens=9, ring_size=2)
    assert layout.part_slots(5) == 1
    with pytest.raises(
        RingShapeError, match=r"expected shards of a multiple of 3 slots, as Ulysses ranks, got 5"
    ):
        layout.part_slots(3)


def test_chunks_per_rank_are_one_or_two() -> None:
    with pytest.raises(RingLayoutError, match=r"expected 1 \(contiguous\) or 2 \(zigzag\), got 3"):
        ChunkLayout(16, 2, 1, 3)


@pytest.mark.parametrize("changed", [{"boundaries": (0, 4, 6, 12)}, {"owners": (0, 1, 1)}], ids="".join)
def test_layouts_of_as_many_pieces_differ_as_texts_which_ranks_compare(changed: dict[str, Any]) -> None:
    piece_layout = PieceLayout(12, 2, 1, (0, 3, 6, 12), (0, 1, 0))
    assert str(replace(piece_layout)) == str(piece_layout) != str(replace(piece_layout, **changed))


# --- what auto promises: work within 5 % of even, no more bytes than must cross --------------------------


MAX_BYTES = 1.05  # over the least that must cross
PatternOf = Callable[[int], Pattern]

# Windows that are short and long against a shard, and LongNet with shards below 8 shortest segments.
SENT: dict[str, PatternOf] = {"causal": lambda tokens: Causal()}
SENT |= {f"window {w}": partial(lambda w, tokens: SlidingWindow(w), w) for w in (256, 1024, 4096)}
SENT |= {"window both ways": lambda tokens: SlidingWindow(1024, causal=False)}
SENT |= rows_of(
    "Dilated",
    lambda _: {
        f"LongNet {shortest} x{growth}, causal {causal}": partial(
            longnet, shortest=shortest, growth=growth, causal=causal
        )
        for shortest, growth, causal in product((2048, 1024, 512), (2, 4), (True, False))
    },
)


@pytest.mark.parametrize(("tokens", "ring_size"), [(4096, 2), (4096, 8), (16384, 4), (16384, 8)])
@pytest.mark.parametrize("pattern_of", SENT.values(), ids=SENT)
@pytest.mark.covering(1)
def test_auto_sends_no_more_than_must_cross(pattern_of: PatternOf, tokens: int, ring_size: int) -> None:
    """Grouped K/V heads with the offsets of two query heads each; counted message by message."""
    pattern = pattern_of(tokens)
    layout = make_layout("auto", tokens=tokens, ring_size=ring_size, pattern=pattern)
    plan = build_plan(pattern, layout, query_heads=4, kv_heads=2)
    sent = sum(plan.rank(rank).tokens_sent for rank in range(ring_size))
    assert sent <= MAX_BYTES * plan.tokens_needed


def work_of_all_heads(pattern: Pattern, layout: Layout, heads: int) -> np.ndarray:
    """Attended pairs of every rank; int64 [ring_size]."""
    classes = find_head_classes(pattern, heads, heads)
    return sum(count_rank_work(bound, layout) * len(range(heads)[mine]) for mine, bound in classes)


# Chunks of documents are uneven: only pieces make them even.
PATTERNS = {
    name: entry for name, entry in LONG_PATTERNS.items() if "balanced" in LAYOUTS or "documents" not in name
}


@pytest.mark.day(
    "causal-16384-2",
    "window 1024-32768-8",
    "window 4096-131072-64",
    "documents-16384-4",
    "LongNet-16384-2",
    "LongNet, growth 4-16384-2",
)
@pytest.mark.parametrize(("tokens", "ring_size"), [(16384, 2), (16384, 4), (32768, 8), (131072, 64)])
@pytest.mark.parametrize("name", PATTERNS)
def test_auto_is_even(name: str, tokens: int, ring_size: int) -> None:
    pattern = PATTERNS[name](tokens)
    layout = make_layout("auto", tokens=tokens, ring_size=ring_size, pattern=pattern)
    work = work_of_all_heads(pattern, layout, heads=2)
    if ring_size <= 8:  # what ranks are told to do adds up to the same
        plan = build_plan(pattern, layout, query_heads=2, kv_heads=2)
        assert [plan.rank(rank).pairs for rank in range(ring_size)] == work.tolist()
    if "documents" in name:  # messages count, too
        mix = ((bind_one_head(pattern), 1),)
        balanced = make_layout("balanced", tokens=tokens, ring_size=ring_size, pattern=pattern)
        times = [entry.time for entry in timed(mix, (layout, balanced))]
        assert times[0] <= times[1]
    else:
        assert work.max() <= EVEN * work.mean()
    assert layout.longest_shard <= 1.1 * tokens / ring_size


@pytest.mark.parametrize(("tokens", "ring_size"), [(16384, 4), (16384, 8)])
@pytest.mark.parametrize("window", [512, 1024, *([4096] if "balanced" in LAYOUTS else [])])
def test_one_layout_is_even_for_layers_that_differ(window: int, tokens: int, ring_size: int) -> None:
    """The sum over layers of the fullest rank's work, since ranks wait for each other in every layer."""
    mix: dict[Pattern, int] = {SlidingWindow(window): 5, Causal(): 1}
    layout = make_layout("auto", tokens=tokens, ring_size=ring_size, pattern=mix)
    works = [layers * work_of_all_heads(entry, layout, heads=1) for entry, layers in mix.items()]
    assert sum(work.max() for work in works) <= EVEN * sum(work.mean() for work in works)
    # balanced for the windows alone would be uneven in the global layers
    local = make_layout("auto", tokens=tokens, ring_size=ring_size, pattern=SlidingWindow(window))
    assert local != layout


def test_a_mix_of_something_else_is_refused() -> None:
    with pytest.raises(RingLayoutError, match="patterns with numbers of layers"):
        make_layout("auto", tokens=64, ring_size=2, pattern={"causal": 1})  # type: ignore[dict-item]
    with pytest.raises(RingLayoutError, match="layers with Causal"):
        make_layout("auto", tokens=64, ring_size=2, pattern={Causal(): 0})


def test_traffic_counts_every_layer() -> None:
    layout = make_layout("zigzag", tokens=4096, ring_size=4)

    def sent(**layers: int) -> int:
        patterns = {"window": SlidingWindow(512), "whole": Causal()}
        mix = tuple((bind_one_head(patterns[name]), count) for name, count in layers.items())
        return choose_best(mix, [rated(mix, layout)])[0].tokens_sent

    assert sent(window=5, whole=2) == 5 * sent(window=1) + 2 * sent(whole=1) > 0


def test_tokens_received_are_not_known_of_shards_with_gaps() -> None:
    """Their work is."""
    pattern = bind_one_head(Causal())
    layouts = [make_layout(name, tokens=16, ring_size=2) for name in ("striped", "contiguous")]
    work, received = compute_costs(pattern, layouts)
    assert work.tolist() == [[64.0, 72.0], [36.0, 100.0]] and not received.any()
    assert compute_costs(pattern, layouts[1:])[1].tolist() == [[0, 8]]


def test_auto_without_a_pattern_is_told_that_it_is_contiguous(caplog: pytest.LogCaptureFixture) -> None:
    layout_module._warn_without_pattern.cache_clear()
    assert make_layout("auto", tokens=64, ring_size=1).name == "contiguous" and not caplog.records
    make_layout("auto", tokens=64, ring_size=4, pattern=Causal())
    make_layout("contiguous", tokens=64, ring_size=4)
    assert not caplog.records
    for _ in range(2):
        make_layout("auto", tokens=64, ring_size=4)
    assert [record.getMessage().count("pass pattern=") for record in caplog.records] == [1]


def test_a_layout_that_is_refused_is_mended_as_its_error_says() -> None:
    layout = make_layout("zigzag", tokens=250, ring_size=3)
    with pytest.raises(RingLayoutError) as refusal:
        whole_blocks(layout, 16)
    (advice,) = re.findall(r"use ([\w.]+)\(layout, 16\)", str(refusal.value))
    module, _, name = advice.rpartition(".")
    mended = getattr(import_module(module), name)(layout, 16)
    assert whole_blocks(mended, 16) is mended is not layout
