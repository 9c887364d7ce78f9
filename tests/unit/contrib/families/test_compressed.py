"""Refusals of compressed entries, and the windows that they are made of."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from torch import nn

from ds_ring.contrib.families.compressed import layers as compressed
from ds_ring.contrib.families.compressed.windows import Windows
from ds_ring.errors import RingConfigError, RingLayoutError, RingPatternError
from ds_ring.layers.scan.sequence_runs import sequence_runs
from ds_ring.patterns.documents.pattern import Documents
from ds_ring.schedule.layout import Layout, make_layout
from ds_ring.schedule.pieces import PieceLayout
from tests.refusals import Refusals, refuse
from tests.unit.models.calls import IDS, ON, attend, sharding


def compressing(current: Any, cache: Any) -> Any:
    layer = SimpleNamespace(config=ON.config, compressor=nn.Linear(1, 1))
    self: Any = SimpleNamespace(_layer=layer, _sharding=current, _own=None)
    return compressed.CompressedEntries.compress(self, IDS, IDS, IDS, cache, 0)


class Compressing(nn.Module):
    """A layer whose compressor is the ring's."""

    def __init__(self) -> None:
        super().__init__()
        self.compressor = nn.Linear(1, 1)
        entries = object.__new__(compressed.CompressedEntries)
        self.compressor.forward = entries.compress  # type: ignore[assignment]


CASES: Refusals = {
    "compressed entries of a cache": (
        lambda: compressing(sharding(), object()), RingConfigError, "expected a call without a cache"
    ),
    "compressed entries of no batch": (
        lambda: compressing(None, None), RingConfigError, "expected the batch's sharding, got NoneType"
    ),
    "compressed entries with a cap": (
        lambda: attend(module=Compressing(), softcap=1.0), RingConfigError, "no softcap or score_mod with"
    ),
}  # fmt: skip


test_it_is_refused = refuse(CASES)


def drawn(seed: int) -> tuple[Layout, int, np.ndarray]:
    """A layout of many pieces, the tokens of a window, and the documents of a row, some of one token."""
    random = np.random.default_rng(seed)
    tokens, ring = int(random.integers(1, 120)), int(random.integers(1, 5))
    cuts = np.flatnonzero(random.random(tokens) < random.choice([0.02, 0.1, 0.5]))
    bounds = (*sorted({0, *cuts.tolist()}), tokens)
    layout = PieceLayout(tokens, ring, 1, bounds, tuple(random.integers(0, ring, len(bounds) - 1).tolist()))
    begins = np.append(random.random(tokens - 1) < random.choice([0, 0.02, 0.1, 0.5]), False)
    ids = np.cumsum(np.roll(begins, 1))
    ids[np.isin(ids, np.flatnonzero(random.random(tokens) < 0.1))] = -1  # padding
    return layout, int(random.choice([1, 3, 4, 16])), ids


@pytest.mark.parametrize("first", range(0, 240, 60))
def test_windows_are_those_of_each_document(first: int) -> None:
    for seed in range(first, first + 60):
        layout, rate, ids = drawn(seed)
        windows = Windows(layout, rate, Documents(ids))
        tokens, begins = np.arange(len(ids)), np.append(0, np.flatnonzero(np.diff(ids)) + 1)
        start = begins[np.searchsorted(begins, tokens, side="right") - 1]
        place, end = (
            tokens - start,
            np.append(begins, len(ids))[np.searchsorted(begins, tokens, side="right")],
        )
        complete = (ids >= 0) & (place % rate == 0) & (tokens + rate <= end)
        assert windows.firsts[windows.has_entry].tolist() == tokens[complete].tolist()
        known = np.isin(start, start[complete])  # tokens of documents with an entry
        for rank in range(layout.ring_size):
            of_slot = layout.positions(rank)
            places = windows.places(rank)
            assert (~places.outside == (known & (ids >= 0))[of_slot] & (of_slot >= 0)).all()
            inside = np.flatnonzero(~places.outside)
            assert (places.tokens[places.places[inside]] == inside).all()
            slots = 1 if windows.layout is None else windows.layout.local_tokens
            local = places.places[inside]
            assert (local // slots == place[of_slot[inside]] % rate).all()
            for overlaps in (False, True):
                check_sources(windows, layout, rank, overlaps)
        if windows.layout is not None:
            check_pattern(windows, place, np.where(ids < 0, -1, start), complete)


def check_sources(windows: Windows, layout: Layout, rank: int, overlaps: bool) -> None:
    """Each entry's window, and the one before it where there is one."""
    runs, before = sequence_runs(layout), windows.before(overlaps)
    halos = [runs.starts[run] - before + np.arange(before) for run in runs.list_rank_runs(rank).tolist()]
    inputs = np.concatenate([layout.positions(rank), *halos])
    result = windows.sources(rank, overlaps)
    if windows.layout is None:
        assert result.tokens.shape == (1, windows.rate) and not result.hidden.any()
        return
    fragments = windows.layout.positions(rank)
    for slot, fragment in enumerate(fragments.tolist()):
        if fragment < 0 or not windows.has_entry[fragment]:
            continue
        local, first, number = result.windows[slot], windows.firsts[fragment], windows.numbers[fragment]
        assert inputs[result.tokens[local]].tolist() == [*range(first, first + windows.rate)]
        assert result.positions[local] == number * windows.rate and not result.hidden[local]
        if overlaps and number:
            assert inputs[result.tokens[local - 1]].tolist() == [*range(first - windows.rate, first)]
            assert not result.hidden[local - 1]
        elif overlaps:
            assert result.hidden[local - 1]


def check_pattern(windows: Windows, place: np.ndarray, start: np.ndarray, complete: np.ndarray) -> None:
    """Each token sees the entries of its document whose windows end with it or before it."""
    tokens = np.arange(len(place))
    fragment = np.searchsorted(windows.starts, tokens, side="right") - 1
    queries = tokens[np.isin(start, start[complete]) & (start >= 0)]
    entries = np.flatnonzero(windows.has_entry)
    first = windows.firsts[entries]
    ends = (place[queries] % windows.rate == windows.rate - 1)[:, None]
    seen = [
        windows.pattern(apart).multiplicity(0, 1, 1, fragment[queries][:, None], entries) > 0
        for apart in (1, 0)
    ]
    wanted = (start[queries][:, None] == start[first]) & (first + windows.rate <= queries[:, None] + 1)
    assert (np.where(ends, seen[1], seen[0]) == wanted).all()
    keys = np.arange(len(windows.starts))  # no other fragment is a key
    others = windows.pattern(1).multiplicity(0, 1, 1, fragment[queries][:, None], keys) > 0
    assert not others[:, ~windows.has_entry].any()


ZIGZAG, STRIPED = (make_layout(name, tokens=6, ring_size=2) for name in ("zigzag", "striped"))
test_documents_and_shards_that_have_no_windows_are_refused = refuse({
    "a gap": (lambda: Windows(ZIGZAG, 2, Documents([0, 0, 1, 1, 0, 0])), RingPatternError,
        "expected consecutive tokens, got one with a gap"),
    "fewer tokens": (lambda: Windows(ZIGZAG, 2, Documents([0, 0, 1, 1])), RingPatternError,
        "expected 6 ids, got 4"),
    "single tokens": (lambda: Windows(STRIPED, 2), RingLayoutError,
        "expected shards of consecutive positions"),
})  # fmt: skip
