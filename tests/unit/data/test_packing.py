"""Packed documents before the cut: whose token is whose, where positions restart, which labels go."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ds_ring.comm.mesh import RingMesh
from ds_ring.data.batch import IGNORE, REAL_TOKENS, prepare_batch, valid_tokens
from ds_ring.data.packing import (
    RowGroup,
    group_rows,
    has_no_label,
    ids_from_positions,
    number_documents,
    number_positions,
    positions_in_documents,
)
from ds_ring.data.ring_batch import REMEMBERED
from ds_ring.errors import RingPatternError, RingShapeError
from ds_ring.layers.scores import Alibi
from ds_ring.masks.catalog import Causal, Chunked, Full
from ds_ring.masks.pattern import Pattern
from ds_ring.ops.context import ContextCache
from ds_ring.patterns.documents.pattern import Documents, Tree
from ds_ring.schedule.grid import Grid
from tests.sessions import session_of

IDS = torch.arange(1, 15).view(2, 7)
DOCUMENTS = torch.tensor([[4, 4, 4, 9, 9, 9, 9], [5, 5, 5, 5, 5, 5, 7]])
POSITIONS = torch.tensor([[0, 1, 2, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 0]])


def packed(pattern: Pattern | None = None, **others: Any) -> dict[str, torch.Tensor]:
    return prepare_batch({"input_ids": IDS, **others}, pattern or Causal(), documents=True)


def test_positions_restart_with_every_document():
    assert packed(document_ids=DOCUMENTS)["position_ids"].equal(POSITIONS)


def test_given_positions_stay():
    positions = torch.arange(7)[None]
    assert packed(document_ids=DOCUMENTS, position_ids=positions)["position_ids"].equal(positions)


def test_a_document_in_two_pieces_is_counted_through():
    positions = positions_in_documents(torch.tensor([[1, 1, 0, 1, 0, 0, -1, -1]]))
    assert positions.tolist() == [[0, 1, 0, 2, 1, 2, 0, 1]]


def test_restarting_positions_are_documents():
    ids = ids_from_positions(torch.tensor([[0, 1, 0, 0, 1, 2, 7]]))
    assert ids.tolist() == [[0, 0, 1, 2, 2, 2, 3]]


@pytest.mark.parametrize("given", [{"document_ids": DOCUMENTS}, {"position_ids": POSITIONS}])
def test_no_document_predicts_the_next_one(given):
    prepared = packed(labels=IDS, **given)
    expected = [[2, 3, IGNORE, 5, 6, 7, IGNORE], [9, 10, 11, 12, 13, IGNORE, IGNORE]]
    assert prepared["labels"].tolist() == prepared["shift_labels"].tolist() == expected
    assert valid_tokens(prepared) == 10


def test_labels_that_are_shifted_already_lose_borders_only_if_causal():
    causal = packed(document_ids=DOCUMENTS, shift_labels=IDS)["labels"]
    assert causal.eq(IGNORE).tolist() == has_no_label(DOCUMENTS).tolist()
    assert packed(Full(), document_ids=DOCUMENTS, shift_labels=IDS)["labels"].equal(IDS)


@pytest.mark.parametrize("pattern", [Causal(), Full()])
def test_padding_belongs_to_no_document(pattern):
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 0, 1, 1, 0]])
    prepared = packed(pattern, attention_mask=mask, document_ids=DOCUMENTS, shift_labels=IDS)
    assert "attention_mask" not in prepared
    assert prepared["document_ids"].tolist() == [[-1, -1, 4, 9, 9, 9, 9], [5, 5, 5, -1, 5, 5, -1]]
    assert prepared["labels"][mask == 0].eq(IGNORE).all()


def test_tokens_of_no_document_are_not_real():
    mask, ids = torch.ones_like(IDS), DOCUMENTS.clone()
    mask[0, 6], ids[1, :2] = 0, -1
    given = {"input_ids": IDS, "attention_mask": mask, "document_ids": ids}
    real = prepare_batch(given, Causal(), documents=True, real_tokens=True)[REAL_TOKENS]
    assert real.tolist() == [[1] * 6 + [0], [0, 0] + [1] * 5]


def test_without_ids_and_positions_a_sample_is_one_document():
    prepared = packed(labels=IDS)
    assert prepared["document_ids"].tolist() == [[0] * 7]
    assert prepared["position_ids"].tolist() == [list(range(7))]
    assert valid_tokens(prepared) == 12


def test_rows_with_equal_borders_share_a_pattern():
    ids = torch.tensor([[1, 1, 2, 2, 2], [3, 3, 3, 3, 3], [8, 8, 0, 0, 0], [1, 1, 2, 2, -1]])
    groups = group_rows(ids, 4)
    assert [group.rows for group in groups] == [(1,), (0, 2), (3,)], "the most work first"
    for group in groups:
        mask = (Causal() & group.documents).mask(torch.arange(5).numpy(), torch.arange(5).numpy())
        for row in group.rows:
            alike = (ids[row][:, None] == ids[row][None]) & (ids[row] >= 0)
            assert mask.tolist() == alike.tril().tolist()


def test_one_row_of_ids_stands_for_all():
    (group,) = group_rows(DOCUMENTS[:1], 3)
    assert group.rows == (0, 1, 2)


DOCUMENTED: dict[str, Any] = {"pattern": {"documents": True}}


def test_documents_are_numbered_row_by_row_where_they_begin():
    """One with a gap is one, padding is none, and rows in no group are one document each."""
    ids = torch.tensor([[7, 7, 2, 7, -1], [-1, -1, -1, -1, -1], [3, 3, 3, 3, 3]])
    groups = group_rows(ids, 3)
    assert number_documents(groups, 3, 5).tolist() == [[0, 0, 1, 0, -1], [-1] * 5, [2] * 5]
    assert number_documents((), 2, 3).tolist() == [[0] * 3, [1] * 3]


def test_batches_of_one_length_keep_their_own_greatest_position():
    session = session_of()
    for first in (0, 50, 0):
        session.shard_batch({"input_ids": IDS, "position_ids": torch.arange(first, first + 7)[None]})
        assert session.batches.current.longest == first + 6


def test_the_latest_lengths_are_kept_and_the_first_one_goes():
    session = session_of()
    found = []
    for tokens in (4, *range(4, 5 + REMEMBERED), 4 + REMEMBERED, 4):
        session.shard_batch({"input_ids": torch.ones(1, tokens, dtype=torch.int64)})
        found.append(session.batches.current)
    assert found[0] is found[1] and found[-3] is found[-2] and found[-1] is not found[0]


def test_a_model_never_sees_document_ids():
    local = session_of(**DOCUMENTED).shard_batch({"input_ids": IDS, "document_ids": DOCUMENTS})
    assert set(local) == {"input_ids", "position_ids"}


@pytest.mark.parametrize("place", [0, 1])
def test_short_batches_keep_their_own_rows_documents(place):
    """Samples are dealt out whole: each rank's attention knows the documents of its own rows."""
    session = session_of(RingMesh(Grid(2, 2), place), min_sequence_length=8, **DOCUMENTED)
    prepared = session.sharder.prepare(lambda: {"input_ids": IDS, "document_ids": DOCUMENTS})
    local, sharding = session.sharder.cut(prepared)
    assert local["input_ids"].equal(IDS[place : place + 1])
    assert sharding.mesh.ring_size == 1
    assert sharding.groups == group_rows(DOCUMENTS[place : place + 1], 1)


def test_rows_come_back_in_their_order():
    session = session_of(**DOCUMENTED)
    ids = torch.tensor([[1, 1, 2, 2, 2], [3, 3, 3, 3, 3], [8, 8, 0, 0, 0]])
    session.shard_batch({"input_ids": ids, "document_ids": ids})
    assert len(session.batches.current.groups) == 2
    q, k, v = (torch.randn(3, 2, 5, 4, generator=torch.Generator().manual_seed(s)) for s in range(3))
    got = session.attention()(q, k, v)
    slots = torch.from_numpy(session.layout.positions(0))
    for row in range(3):
        own = ids[row][slots]
        mask = (own[:, None] == own[None]) & (slots[:, None] >= slots[None])
        expected = torch.nn.functional.scaled_dot_product_attention(q[row], k[row], v[row], attn_mask=mask)
        assert torch.allclose(got[row], expected, atol=1e-6)
    with pytest.raises(RingShapeError, match=r"expected the batch's 3 samples, got 2"):
        session.attention()(q[:2], k[:2], v[:2])


def test_a_backward_pass_outlives_the_table_of_contexts(monkeypatch):
    """Documents make new contexts with every batch, and the mesh keeps only the latest."""
    monkeypatch.setattr("ds_ring.ops.context.KEPT_CONTEXTS", 1)
    session = session_of(**DOCUMENTED)
    q = torch.randn(2, 2, 7, 4, requires_grad=True)
    outs = []
    for shift in range(3):
        batch = {"input_ids": IDS, "document_ids": DOCUMENTS.roll(shift, dims=1)}
        session.shard_batch(batch)
        outs.append(session.attention()(q, q, q))
    assert len(session.run_mesh.owners[ContextCache].by_key) == 1
    sum(out.square().sum() for out in outs).backward()
    assert q.grad is not None and q.grad.isfinite().all()


WRONG: dict[str, tuple[dict[str, Any], bool, type[Exception], str]] = {
    "not asked for": ({"document_ids": DOCUMENTS}, False, RingPatternError,
        'got some; set "documents": true'),
    "restarting positions": ({"position_ids": POSITIONS}, False, RingPatternError,
        'packed documents; set "pattern": {"documents": true}'),
    "floats": ({"document_ids": DOCUMENTS.float()}, True, RingShapeError,
        r"expected integers \[samples, tokens\].*got float32 \[2, 7\]"),
    "three dims": ({"document_ids": DOCUMENTS[..., None]}, True, RingShapeError, r"got int64 \[2, 7, 1\]"),
    "too short": ({"document_ids": DOCUMENTS[:, :6]}, True, RingShapeError, r"expected \[2, 7, ...\]"),
    "three axes": ({"position_ids": torch.zeros(2, 7, 3, dtype=torch.int64)}, True, RingShapeError,
        r"expected \[samples, tokens\]"),
    "numbers in the mask": ({"attention_mask": DOCUMENTS}, True, RingPatternError,
        "expected 0 and 1, got 9; use document_ids"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_what_cannot_be_packed_is_refused(what):
    others, documents, error, words = WRONG[what]
    with pytest.raises(error, match=words):
        prepare_batch({"input_ids": IDS, **others}, Causal(), documents)


def test_places_in_a_document_or_on_a_path_number_tokens() -> None:
    slots, tree = torch.tensor([0, 2, 3, 5]), Tree((-1, 0, 0), (2, 2, 2))
    assert number_positions(Documents([0, 0, 0, 1, 1, 1]), slots).tolist() == [0, 2, 0, 2]
    assert number_positions(tree, slots).tolist() == [0, 2, 3, 3]
    assert number_positions(None, slots) is slots
    score_mod = RowGroup(tree, (0,)).along_paths(Alibi((0.5,)))
    assert score_mod is not None and RowGroup(tree, (0,)).along_paths(None) is None
    # From the end of the second branch, depth 3, to the root, depth 0.
    where = [torch.tensor(number) for number in (0, 0, 5, 0)]
    assert float(score_mod(torch.tensor(1.0), *where)) == 1.0 - 0.5 * 3


def test_chunks_begin_with_each_document() -> None:
    ids = torch.tensor([[4, 4, 4, 4, 4, 7, 7, 7, 7, -1]])
    (group,) = group_rows(ids, 1)
    places = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2, 3, 0])
    chunks, at = places // 3, torch.arange(10)
    expected = (ids[0][:, None] == ids[0]) & (chunks[:, None] == chunks) & (at[:, None] >= at) & (at < 9)
    got = group.narrowed(Chunked(3)).mask(np.arange(10), np.arange(10))
    assert torch.equal(torch.as_tensor(got), expected)
    (parted,) = group_rows(torch.tensor([[1, 2, 1]]), 1)
    with pytest.raises(RingPatternError, match="put them together"):
        parted.narrowed(Chunked(2))
