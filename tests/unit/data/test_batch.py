"""Batches: what is done before the tokens are cut apart, and both ways of cutting."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ds_ring.comm.mesh import RingMesh
from ds_ring.data import batch
from ds_ring.data.batch import (
    IGNORE,
    prepare_batch,
    split_samples,
    split_tokens,
    token_shape,
    valid_tokens,
)
from ds_ring.errors import RingConfigError, RingPatternError, RingShapeError
from ds_ring.masks.catalog import Causal, Full
from ds_ring.schedule.grid import Grid
from ds_ring.schedule.layout import make_layout

IDS = torch.arange(1, 15).view(2, 7)


def mesh_of(ring_rank: int, ring_size: int) -> RingMesh:
    return RingMesh(Grid(ring_size, ring_size), ring_rank)


def test_labels_are_shifted_before_the_cut():
    prepared = prepare_batch({"input_ids": IDS, "labels": IDS}, Causal())
    expected = [[2, 3, 4, 5, 6, 7, IGNORE], [9, 10, 11, 12, 13, 14, IGNORE]]
    assert prepared["labels"].tolist() == expected
    assert prepared["shift_labels"].tolist() == expected
    assert valid_tokens(prepared) == 12


def test_labels_that_are_shifted_already_stay():
    prepared = prepare_batch({"input_ids": IDS, "shift_labels": IDS}, Full())
    assert prepared["labels"].tolist() == IDS.tolist()


def test_labels_that_are_the_next_tokens_are_refused():
    """(They were shifted a second time, without a word.)"""
    shifted = torch.nn.functional.pad(IDS[:, 1:], (0, 1), value=IGNORE)
    with pytest.raises(RingConfigError, match=r"labels\[i\] of token i \+ 1; .*\"shift_labels\""):
        prepare_batch({"input_ids": IDS, "labels": shifted}, Causal())
    prompt = shifted.clone()
    prompt[:, :2] = IGNORE
    with pytest.raises(RingConfigError, match="shift_labels"):
        prepare_batch({"input_ids": IDS, "labels": prompt}, Causal())


def test_labels_that_only_look_shifted_are_taken():
    one_token = torch.full((2, 7), 5)
    few = torch.full((2, 7), IGNORE)
    few[:, 3] = IDS[:, 4]  # too few to tell
    other = IDS.clone()
    other[0, 0] = 99
    for ids, labels in ((one_token, one_token), (IDS, few), (IDS, other)):
        assert "labels" in prepare_batch({"input_ids": ids, "labels": labels}, Causal())


def test_a_batch_without_labels_has_no_loss():
    prepared = prepare_batch({"input_ids": IDS}, Causal())
    assert set(prepared) == {"input_ids", "position_ids"}
    assert valid_tokens(prepared) == 0


@pytest.mark.parametrize("name", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("ring_size", [1, 2, 3, 4])
def test_every_token_meets_its_own_label_and_position(name, ring_size):
    prepared = prepare_batch({"input_ids": IDS, "labels": IDS}, Causal())
    layout = make_layout(name, tokens=7, ring_size=ring_size)
    seen = []
    for ring_rank in range(ring_size):
        local = split_tokens(prepared, layout, mesh_of(ring_rank, ring_size))
        assert local["input_ids"].shape == (2, layout.local_tokens)
        for slot, position in enumerate(layout.positions(ring_rank)):
            entry = [local[key][:, slot].tolist() for key in ("input_ids", "labels")]
            if position < 0:
                assert entry == [[0, 0], [IGNORE, IGNORE]] and local["position_ids"][0, slot] == 0
                continue
            assert entry == [IDS[:, position].tolist(), prepared["labels"][:, position].tolist()]
            assert local["position_ids"][0, slot] == position
            seen.append(int(position))
    assert sorted(seen) == list(range(7))


@pytest.mark.parametrize(("samples", "places"), [(4, 2), (3, 2), (3, 4), (1, 4), (5, 4)])
def test_samples_are_dealt_out_once(samples, places):
    ids = torch.arange(1, samples * 3 + 1).view(samples, 3)
    prepared = prepare_batch({"input_ids": ids, "labels": ids}, Causal())
    parts = [split_samples(prepared, place, places) for place in range(places)]
    assert {token_shape(part) for part in parts} == {(-(-samples // places), 3)}
    rows = [row for part in parts for row in part["input_ids"].tolist() if any(row)]
    assert rows == ids.tolist()
    assert sum(valid_tokens(part) for part in parts) == valid_tokens(prepared)


def test_right_padding_is_dropped():
    mask = torch.ones_like(IDS)
    mask[1, 4:] = 0
    labels = IDS.masked_fill(mask == 0, IGNORE)
    prepared = prepare_batch({"input_ids": IDS, "labels": labels, "attention_mask": mask}, Causal())
    assert "attention_mask" not in prepared
    assert valid_tokens(prepared) == 6 + 3


def test_a_mask_of_ones_is_dropped_for_any_pattern():
    batch = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}
    assert "attention_mask" not in prepare_batch(batch, Full())


def test_per_token_tensors_travel_with_their_tokens():
    weights = torch.rand(2, 7, 3)
    prepared = prepare_batch({"input_ids": IDS, "weights": weights}, Causal())
    layout = make_layout("zigzag", tokens=7, ring_size=2)
    local = split_tokens(prepared, layout, mesh_of(1, 2))["weights"]
    real = [position for position in layout.positions(1) if position >= 0]
    assert torch.equal(local[:, : len(real)], weights[:, real])


def padded(*rows: list[int]) -> dict[str, torch.Tensor]:
    return {"input_ids": IDS, "attention_mask": torch.tensor(rows)}


ONES, LEFT, HOLE, RIGHT = [1] * 7, [0, 0, 1, 1, 1, 1, 1], [1, 1, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 0]

SHAPE, PATTERN = RingShapeError, RingPatternError
PACKED = torch.tensor([[0, 1, 2, 0, 1, 2, 3]] * 2)


def with_ids(**others: Any) -> dict[str, Any]:
    return {"input_ids": IDS, **others}


WRONG: dict[str, tuple[Any, Any, type[Exception], str]] = {
    "a tensor": (IDS, Causal(), SHAPE, "mapping of names to tensors, got Tensor"),
    "no tokens": ({"labels": IDS}, Causal(), SHAPE, r"or inputs_embeds, got the keys \['labels'\]"),
    "a list": (with_ids(text=["a", "b"]), Causal(), SHAPE, r"batch\['text'\].*got list"),
    "one dim": ({"input_ids": IDS[0]}, Causal(), SHAPE, r"got \[7\]"),
    "empty": ({"input_ids": IDS[:0]}, Causal(), SHAPE, r"samples, tokens\], got \[0, 7\]"),
    "short labels": (with_ids(labels=IDS[:, :5]), Causal(), SHAPE, r"expected \[2, 7, ...\]"),
    "few labels": (with_ids(labels=IDS[:1]), Causal(), SHAPE, r"got \[1, 7\]"),
    "a number": (with_ids(weight=torch.tensor(1.0)), Causal(), SHAPE, r"'weight'.*got \[\]"),
    "left padding": (padded(ONES, LEFT), Causal(), PATTERN, "masked token 1 before .* sample 1"),
    "a hole": (padded(HOLE, ONES), Causal(), PATTERN, "masked token 2 before .* sample 0"),
    "padding, full": (padded(ONES, RIGHT), Full(), PATTERN, "got 2 masked"),
    "4-D mask": (with_ids(attention_mask=torch.ones(2, 1, 7, 7)), Causal(), SHAPE, r"expected \[2, 7\]"),
    "labels of padding": ({**padded(ONES, RIGHT), "labels": IDS}, Causal(), PATTERN,
        "in padding, got 1 others"),
    "labels, full": (with_ids(labels=IDS), Full(), PATTERN, "expected a causal pattern"),
    "packed": (with_ids(position_ids=PACKED), Causal(), PATTERN, "2, 0 at token 3 of sample 0: packed"),
    "3 axes": (with_ids(position_ids=torch.zeros(2, 7, 3)), Causal(), SHAPE, r"expected \[samples, tokens\]"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_what_cannot_be_sharded_is_refused(what):
    batch, pattern, error, words = WRONG[what]
    with pytest.raises(error, match=words):
        prepare_batch(batch, pattern)


def test_rows_that_name_no_documents_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    """A loader may have dropped `document_ids`, and the documents of a row see each other."""
    batch._warn_about_whole_rows.cache_clear()
    named = {"input_ids": IDS, "document_ids": torch.zeros_like(IDS)}
    for given in (named, {"input_ids": IDS, "position_ids": torch.arange(7)[None]}):
        prepare_batch(given, Causal(), documents=True)
    assert not caplog.messages
    for _ in range(2):
        prepare_batch({"input_ids": IDS}, Causal(), documents=True)
    (line,) = caplog.messages
    assert "each of its rows counts as one document" in line
