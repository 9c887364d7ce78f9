"""LongNet's dilation, windows and packed documents train on a ring as on one process; documents stay apart.

The one process runs transformers' eager attention, to whose scores the logarithm of the multiplicity is
added: the table of DESIGN's definition, pair by pair, without a line of the patterns under test.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.dist.deepspeed_ranks import (
    VOCABULARY,
    Batch,
    Run,
    Size,
    build_model,
    json_config,
    train_alone,
    train_on_ring,
)
from tests.dist.family_ranks import attached, start_session
from tests.dist.test_deepspeed_parity import check_parity

STEPS = 3
HEADS = 4  # of deepspeed_ranks' models
SIZE = Size(hidden=32, layers=2, tokens=83, samples=2)
LENGTHS = [[20, 1, 35, 27], [50, 33]]  # of the documents in each of two samples
SEGMENTS, DILATIONS, WINDOW = (8, 32, 64), (1, 2, 4), 9

LONGNET = {"segment_lengths": SEGMENTS, "dilation_rates": DILATIONS}


def document_ids_of(samples: int) -> Tensor:
    """The samples' documents in turn, numbered anew in each sample."""
    rows = [torch.repeat_interleave(torch.tensor(LENGTHS[row % 2])) + 10 * row for row in range(samples)]
    return torch.stack(rows)


def restarting(document_ids: Tensor) -> Tensor:
    """Positions that count from 0 in each document, token by token."""
    rows = []
    for row in document_ids.tolist():
        positions: list[int] = []
        for token, document in enumerate(row):
            again = token == 0 or document != row[token - 1]
            positions.append(0 if again else positions[-1] + 1)
        rows.append(positions)
    return torch.tensor(rows)


def multiplicity(pattern: dict[str, Any], document_ids: Tensor) -> Tensor:
    """How often query q attends to key k, [B, H, T, T], by the definition."""
    tokens = document_ids.shape[1]
    q, k = torch.arange(tokens)[:, None], torch.arange(tokens)[None]
    by_head = []
    for head in range(HEADS):
        m = torch.zeros(tokens, tokens) if "segment_lengths" in pattern else torch.ones(tokens, tokens)
        for w, r in zip(pattern.get("segment_lengths", ()), pattern.get("dilation_rates", ()), strict=True):
            offset = head % r
            m += (q // w == k // w) & (q % w % r == offset) & (k % w % r == offset)
        by_head.append(m * (k <= q) * (q - k < pattern.get("window", tokens)))
    m = torch.stack(by_head).expand(len(document_ids), -1, -1, -1)
    if pattern.get("documents"):
        m = m * (document_ids[:, None, :, None] == document_ids[:, None, None, :])
    return m


def tokens_and_labels(samples: int = SIZE.samples) -> Batch:
    ids = torch.randint(1, VOCABULARY, (samples, SIZE.tokens), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def train_dense(pattern: dict[str, Any], most: int = 9) -> Run:
    """One process; transformers shifts the labels, so a document's first token is the one not to predict.

    `most` caps the multiplicity: 1 is a mask that forgets how many branches see a pair.
    """
    batch, document_ids = tokens_and_labels(), document_ids_of(SIZE.samples)
    m = multiplicity(pattern, document_ids).clamp(max=most)
    assert (m.sum(-1) > 0).all(), "a query without keys: transformers would attend to everything"
    batch["attention_mask"] = m.log().clamp(min=-1e30)
    if pattern.get("documents"):
        batch["position_ids"] = restarting(document_ids)
        batch["labels"] = batch["labels"].masked_fill(batch["position_ids"] == 0, -100)
    return train_alone(SIZE, STEPS, batch=batch, implementation="eager")


class Case(NamedTuple):
    world: int
    ring: int
    stage: int
    pattern: dict[str, Any]
    section: dict[str, Any] = {}  # noqa: RUF012 (never changed)


PACKED = {"documents": True}
CASES = {
    "longnet, ring 2, zero 1": Case(2, 2, 1, LONGNET),
    "longnet, ring 4, zero 3": Case(4, 4, 3, LONGNET),
    "longnet, ring 2 x ulysses 2": Case(4, 4, 1, LONGNET, {"ulysses_size": 2}),
    "longnet, striped": Case(2, 2, 0, LONGNET, {"layout": "striped"}),
    "documents, ring 2, zero 1": Case(2, 2, 1, PACKED),
    "documents, ring 2, zero 3": Case(2, 2, 3, PACKED),
    "documents, ring 4, zero 1": Case(4, 4, 1, PACKED, {"layout": "document_zigzag"}),
    "documents, data 2 x ring 2": Case(4, 2, 2, PACKED, {"layout": "zigzag"}),
    "documents, ring 2 x ulysses 2": Case(4, 4, 1, PACKED, {"ulysses_size": 2}),
    "documents, short batches": Case(2, 2, 1, PACKED, {"min_sequence_length": SIZE.tokens + 1}),
    "documents in windows": Case(2, 2, 1, PACKED | {"window": WINDOW}),
    "longnet with documents": Case(2, 2, 1, PACKED | LONGNET),
}


@pytest.mark.day("documents, ring 2, zero 1")
@pytest.mark.parametrize("name", CASES)
def test_training_equals_one_process(rank_pool, name):
    world, ring, stage, pattern, section = CASES[name]
    batch = tokens_and_labels()
    if pattern.get("documents"):
        batch["document_ids"] = document_ids_of(SIZE.samples)
    section = {"layout": "auto", **section, "pattern": {"causal": True, **pattern}}
    config = json_config(ring, SIZE.samples * ring // world, stage, ring_attention=section)
    runs = rank_pool(world).run(train_on_ring, SIZE, config, STEPS, batch=batch, timeout_s=120)
    check_parity(runs, train_dense(pattern))


WRONG_MASKS = {
    "documents that leak": (PACKED, PACKED | {"documents": False}, 9),
    "no dilation": (LONGNET, {}, 9),
    "no multiplicity": (LONGNET, LONGNET, 1),
}


@pytest.mark.parametrize("what", WRONG_MASKS)
def test_a_wrong_mask_would_be_seen(what):
    """By the comparison above, in the gradients alone and in the losses."""
    right, wrong, most = WRONG_MASKS[what]
    expected, got = train_dense(right), train_dense(wrong, most)
    with pytest.raises(AssertionError, match="losses of rank 0"):
        check_parity([got], expected)
    with pytest.raises(AssertionError, match="relative error"):
        check_parity([got._replace(losses=expected.losses)], expected)


def logits_of(rank: int, world_size: int, pattern: dict[str, Any], batches: list[Batch]) -> list[Tensor]:
    """A model's logits of whole batches, without DeepSpeed."""
    session = start_session(world_size, pattern=pattern)
    model = attached(build_model(SIZE, "ds_ring"), session)
    with torch.no_grad():
        sharded = [session.shard_batch(batch) for batch in batches]  # drawn ahead, each with its documents
        return [session.gather(model(**batch).logits) for batch in sharded]


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.day("3")
def test_documents_do_not_see_each_other(rank_pool, world):
    """Other tokens in the second document of sample 0: its own logits change, and no others by a bit."""
    ids, documents = tokens_and_labels()["input_ids"], document_ids_of(2)
    changed = ids.clone()
    inside = torch.zeros_like(ids, dtype=torch.bool)
    inside[0] = documents[0] == 2
    changed[inside] = (ids[inside] + 1) % VOCABULARY
    batches = [{"input_ids": x, "document_ids": documents} for x in (ids, changed)]
    for before, after in rank_pool(world).run(logits_of, PACKED, batches):
        differs = (before != after).any(-1)
        assert differs.equal(inside)


def test_ids_and_restarting_positions_say_the_same(rank_pool):
    ids, documents = tokens_and_labels()["input_ids"], document_ids_of(2)
    batches: list[Batch] = [
        {"input_ids": ids, "document_ids": documents},
        {"input_ids": ids, "position_ids": restarting(documents)},
        {"input_ids": ids, "document_ids": documents * 7 % 5, "position_ids": restarting(documents)},
    ]
    by_ids, *others = rank_pool(2).run(logits_of, PACKED, batches)[0]
    for second in others:
        assert by_ids.equal(second)


def test_each_sample_has_its_own_documents(rank_pool):
    """Three samples, two of them packed alike: as each sample by itself."""
    ids, documents = tokens_and_labels(3)["input_ids"], document_ids_of(3)
    whole = {"input_ids": ids, "document_ids": documents}
    alone = [{key: value[row : row + 1] for key, value in whole.items()} for row in range(3)]
    together, *parts = rank_pool(2).run(logits_of, PACKED, [whole, *alone])[0]
    assert torch.allclose(together, torch.cat(parts), atol=1e-5)


def other_documents_on_rank_1(rank: int, world_size: int) -> None:
    documents = document_ids_of(2)
    if rank == 1:
        documents[1, 49] += 1  # one document ends a token sooner
    logits_of(rank, world_size, PACKED, [{**tokens_and_labels(), "document_ids": documents}])


def test_ranks_with_different_documents_all_stop(rank_pool):
    for outcome in rank_pool(2).collect(other_documents_on_rank_1):
        assert outcome.error_type == "RingMismatchError", outcome.report
        assert "input tokens (checksum)" in outcome.message


def losses_of(
    rank: int, world_size: int, batch: Batch, losses: Tensor, layouts: tuple[str, ...]
) -> list[tuple[Any, Any]]:
    """`document_losses` of given losses of all tokens, by ring and layout, and of a model's log-probabilities."""
    from ds_ring import shard_sequence
    from ds_ring.comm.mesh import RingMesh
    from ds_ring.errors import RingError
    from ds_ring.models.attach import attach
    from tests.sessions import session_of

    pattern, result = {"documents": "document_ids" in batch}, []
    for ring_size, ulysses_size in ((1, 1), (2, 1), (4, 1), (2, 2)):
        mesh = RingMesh.from_world(ring_size, ulysses_size)
        for layout in layouts:
            session = session_of(mesh, layout=layout, pattern=pattern)
            local = session.shard_batch(batch)
            session.shard_batch({"input_ids": torch.zeros(1, 9, dtype=torch.int64)})  # drawn ahead
            layout_of = session.batches.select(local.values()).layout
            mine = shard_sequence(losses, layout_of, mesh=mesh, dim=1)
            inputs = session.document_losses(mine, local)
            model = build_model(SIZE, "ds_ring")
            attach(model, session)
            with torch.no_grad():
                result.append((inputs, session.document_losses(-session.logprobs(model, local), local)))
            for wrong in (mine[:, 1:] if mesh.sequence_rank == 0 else mine, mine.long()):
                with pytest.raises(RingError):  # on every rank, where one is wrong
                    session.document_losses(wrong, local)
    return result


@pytest.mark.night
@pytest.mark.parametrize("layouts", [("zigzag",), ("contiguous", "balanced")], ids="-".join)
@pytest.mark.parametrize("packed", [True, False])
def test_the_losses_of_documents_are_those_of_one_process(rank_pool, packed, layouts):
    """Given losses: the same bits for all rings and layouts. A document of one token, and padding, has no label."""
    batch, documents = tokens_and_labels(), document_ids_of(SIZE.samples)
    labels = batch["labels"].clone()
    labels[0, 22:30] = labels[1, -3:] = -100  # a prompt, and padding
    batch["labels"], batch["attention_mask"] = labels, torch.ones_like(labels)
    batch["attention_mask"][1, -3:] = 0
    model, alone, counts = build_model(SIZE, "sdpa"), [], []
    if packed:
        batch["document_ids"] = documents
    losses = torch.randn(documents.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    inputs = []
    for row in range(SIZE.samples):
        for document in documents[row].unique() if packed else [None]:
            owned = (documents[row] == document if packed else documents[row] >= 0) & batch["attention_mask"][
                row
            ].bool()
            ids, next_labels = batch["input_ids"][row, owned][None], labels[row, owned][1:]
            of_tokens = torch.nn.functional.cross_entropy(
                model(input_ids=ids).logits[0, :-1], next_labels, reduction="none"
            )
            counts.append(int((next_labels >= 0).sum()))
            alone.append(of_tokens[next_labels >= 0].mean().detach())
            inputs.append(losses[row, owned][:-1][next_labels >= 0].mean())
    assert counts == ([19, 0, 26, 26, 49, 29] if packed else [74, 79])
    for rank in rank_pool(4).run(losses_of, batch, losses, layouts):
        for of_given, of_model in rank:
            assert of_given.labelled_tokens.tolist() == of_model.labelled_tokens.tolist() == counts
            assert torch.equal(of_given.means.nan_to_num(), rank[0][0].means.nan_to_num())
            torch.testing.assert_close(
                of_given.means, torch.stack(inputs), rtol=1e-13, atol=1e-13, equal_nan=True
            )
            torch.testing.assert_close(
                of_model.means, torch.stack(alone).double(), rtol=1e-5, atol=1e-6, equal_nan=True
            )
