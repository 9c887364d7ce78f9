"""Documents that stay whole, or are shared among few ranks: every token once, and never a slower layout."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from ds_ring import Causal, Documents, SlidingWindow, build_plan, make_layout
from ds_ring.masks.pattern import Pattern
from ds_ring.patterns.documents.shared import whole_and_shared
from ds_ring.schedule.choose import bind_one_head, compute_costs, timed

RANKS, SHARD = 8, 256


def packed(draw: str, seed: int, tokens: int = RANKS * SHARD) -> np.ndarray:
    """Return the ids of documents whose lengths are drawn; a tenth of them are padding."""
    rng = np.random.default_rng(seed)
    draws = {
        "lognormal": lambda: rng.lognormal(4, 1.5),
        "uniform": lambda: rng.integers(1, 600),
        "heavy tail": lambda: rng.lognormal(6.5, 1) if rng.random() < 0.1 else rng.lognormal(3, 1),
    }
    lengths = [max(int(draws[draw]()), 1) for _ in range(tokens)]
    ids = np.repeat(np.arange(len(lengths)), lengths)[:tokens]
    return np.where(ids % 10 == 9, -1, ids)


@pytest.mark.parametrize("draw", ["lognormal", "uniform", "heavy tail"])
@pytest.mark.parametrize("more", [Causal(), SlidingWindow(100), None], ids=str)
def test_every_token_has_one_place_and_shards_are_equal(draw: str, more: Pattern | None) -> None:
    ids = packed(draw, 1)
    pattern = Documents(ids) if more is None else Documents(ids) & more
    mix = ((bind_one_head(pattern), 1),)
    for layout in whole_and_shared(len(ids), RANKS, 1, mix):
        slots = layout.slots_by_position()
        assert sorted(slots.tolist()) == list(range(len(ids)))
        assert layout.longest_shard == SHARD
        (work,), (received,) = compute_costs(pattern, [layout])
        plan = build_plan(pattern, layout)
        ranks = [plan.rank(rank) for rank in range(RANKS)]
        assert work.tolist() == [one.pairs for one in ranks]
        assert received.tolist() == [one.tokens_received for one in ranks]


@pytest.mark.parametrize("draw", ["lognormal", "uniform", "heavy tail"])
@pytest.mark.parametrize("tokens", [RANKS * SHARD, RANKS * SHARD - 5])
def test_auto_is_never_slower_than_without(draw: str, tokens: int) -> None:
    faster = 0
    for seed in range(8):
        pattern = Documents(packed(draw, seed, tokens)) & Causal()
        made = {
            name: make_layout(name, tokens=tokens, ring_size=RANKS, pattern=pattern)
            for name in ("auto", "balanced", "zigzag", "contiguous")
        }
        mix = ((bind_one_head(pattern), 1),)
        times = {name: timed(mix, [layout])[0].time for name, layout in made.items()}
        assert times["auto"] <= times["balanced"] + 1e-9
        faster += times["auto"] < times["balanced"]
    assert faster


def test_a_short_document_stays_on_one_rank() -> None:
    ids = np.repeat(np.arange(64), 32)
    pattern = Documents(ids) & Causal()
    layout = whole_and_shared(len(ids), 8, 1, ((bind_one_head(pattern), 1),))[0]
    assert compute_costs(pattern, [layout])[1].sum() == 0
    rows = sorted(tuple(run) for rank in range(8) for run in layout.runs(rank).tolist())
    assert all(one[0] + one[2] == other[0] for one, other in pairwise(rows))


def test_without_documents_there_is_nothing_to_keep_together() -> None:
    assert whole_and_shared(64, 4, 1, ((bind_one_head(Causal()), 1),)) == []
