"""Documents: who is in whose document, token by token, and the tiles painted against it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ds_ring import Causal, Documents, RingPatternError, SlidingWindow, build_plan
from ds_ring.schedule.layout import expand_runs
from tests.cases import LAYOUTS, document_ids, layout_for
from tests.unit.masks.painting import coverage, paint, positions_agree
from tests.unit.patterns.dilated.test_dilated import in_order, runs


def same_document(ids: list[int]) -> np.ndarray:
    """The definition: two tokens of one id that is not padding."""
    return np.array([[int(a == b and a >= 0) for b in ids] for a in ids])


@given(
    stretches=st.lists(st.tuples(st.integers(-1, 5), st.integers(1, 40)), min_size=1, max_size=12),
    q=runs,
    k=runs,
    data=st.data(),
)
def test_tiles_of_random_runs_are_the_definition(
    stretches: list[tuple[int, int]],
    q: list[tuple[int, int, int]],
    k: list[tuple[int, int, int]],
    data: st.DataObject,
) -> None:
    q_runs, k_runs = in_order(q), in_order(k)
    q_positions, k_positions = expand_runs(q_runs), expand_runs(k_runs)
    tokens = 1 + int(max(q_positions.max(), k_positions.max()))
    ids = [i for i, length in stretches for _ in range(length)]
    ids = (ids * (tokens // len(ids) + 1))[:tokens]
    pattern, want = Documents(ids), same_document(ids)[np.ix_(q_positions, k_positions)]
    gap = q_positions[:, None] - k_positions[None, :]
    window = data.draw(st.integers(1, 50))
    for case, mask in (
        (pattern, want),
        (pattern & Causal(), want * (gap >= 0)),
        (SlidingWindow(window, causal=False) & pattern, want * (abs(gap) < window)),
    ):
        tiles = case.tiles(q_runs, k_runs)
        assert positions_agree(tiles, q_positions, k_positions)
        assert coverage(tiles, len(q_positions), len(k_positions)).max(initial=0) <= 1
        np.testing.assert_array_equal(paint(tiles, len(q_positions), len(k_positions)), mask)
        counts = case.multiplicity(3, 8, 2, q_positions[:, None], k_positions[None, :])
        np.testing.assert_array_equal(counts, mask)


@pytest.mark.parametrize(
    ("position_ids", "document_ids"),
    [
        ([0, 1, 2, 0, 1, 0, 0, 1], [0, 0, 0, 1, 1, 2, 3, 3]),
        ([0, 1, 2, 3], [7, 7, 7, 7]),
        ([5, 6, 7, 0, 1], [0, 0, 0, 1, 1]),  # the sequence begins inside a document
        ([0, 0, 0], [0, 1, 2]),
    ],
)
def test_positions_that_restart_are_documents(position_ids: list[int], document_ids: list[int]) -> None:
    every = np.arange(len(position_ids))
    masks = [d.mask(every, every) for d in (Documents(position_ids=position_ids), Documents(document_ids))]
    np.testing.assert_array_equal(masks[0], masks[1])
    np.testing.assert_array_equal(masks[0], same_document(document_ids).astype(bool))


def test_a_document_in_two_stretches_is_one_and_padding_sees_nothing() -> None:
    pattern, every = Documents([0, 0, 1, 0, -1, -1]), np.arange(6)
    mask = pattern.mask(every, every)
    assert mask[0].tolist() == mask[3].tolist() == [True, True, False, True, False, False]
    assert not mask[4].any() and not mask[:, 4].any()


def test_whatever_the_ids_come_in_equal_documents_are_equal() -> None:
    ids = [0, 0, 1, 1, 1]
    given_as: list[Any] = [
        ids, tuple(ids), np.array(ids, dtype=np.int32), torch.tensor(ids), torch.tensor([ids]),
    ]  # fmt: skip
    patterns = {Documents(value) for value in given_as}
    assert len(patterns) == 1 and patterns != {Documents([0, 0, 0, 1, 1])}
    assert next(iter(patterns)).tokens == 5


@pytest.mark.night
def test_a_document_table_grows_with_the_documents_and_not_with_their_square() -> None:
    tokens = 1 << 17
    ids = document_ids(tokens, mean=500)
    pattern = Documents(ids) & Causal()
    tiles = pattern.tiles(np.array([[0, 1, tokens]]), np.array([[0, 1, tokens]]))
    lengths = np.bincount(ids)
    assert len(tiles) == np.count_nonzero(lengths)
    assert int(tiles.pairs.sum()) == int((lengths * (lengths + 1) // 2).sum())


@pytest.mark.parametrize("layout_name", LAYOUTS)
def test_documents_that_end_with_the_shard_send_nothing(layout_name: str) -> None:
    layout = layout_for(layout_name, Causal() & SlidingWindow(9), tokens=64, ring_size=4)
    ids = np.zeros(64, dtype=int)
    for rank in range(4):
        positions = layout.positions(rank)
        ids[positions[positions >= 0]] = rank
    assert build_plan(Documents(ids), layout).tokens_sent == 0
    assert build_plan(Documents(np.roll(ids, 1) // 2), layout).tokens_sent > 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "document_ids or position_ids.*give one"),
        ({"document_ids": [0], "position_ids": [0]}, "document_ids or position_ids.*give one"),
        ({"document_ids": [0.0, 1.0]}, "expected integers .* got float64"),
        ({"document_ids": []}, "got float64 of shape \\(0,\\)"),
        ({"document_ids": np.empty(0, dtype=np.int64)}, "got int64 of shape \\(0,\\)"),
        (
            {"document_ids": np.zeros((2, 4), dtype=int)},
            r"of shape \(2, 4\); for a batch .* one pattern for each",
        ),
        ({"position_ids": 3}, r"of shape \(\)"),
        ({"document_ids": [True, False]}, "expected integers .* got bool"),
    ],
)
def test_documents_that_cannot_be(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(RingPatternError, match=said):
        Documents(**arguments)
