"""Dynamic rings on real ranks: gradients of one process however a batch is divided, resuming, and refusals.

The one process runs transformers' own attention on each sample by itself: no padding, no packing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

import ds_ring
from ds_ring.data.dynamic_ring.intervals import SubRings
from ds_ring.data.loader import SampleOrder, padded
from ds_ring.data.packing import PackedRows
from ds_ring.data.session import RingSession
from tests.dist.deepspeed_ranks import (
    VOCABULARY,
    Size,
    build_model,
    check_gradients,
    full_gradient,
    json_config,
    start_deepspeed,
    start_engine,
)
from tests.dist.harness import catch_refusals
from tests.dist.test_loader import forking_session

SIZE = Size(hidden=32, layers=2, tokens=0, samples=0)
MEASURED = "ds_ring.data.dynamic_ring.assignment.measure_times"
SAMPLES, LONGEST = 24, 90


class Machine:
    """What a sample takes where messages cost: short samples are faster on few ranks, long ones on many."""

    def fixed(self, ranks: int) -> float:
        return 5.0 * (ranks - 1)

    def sample(self, tokens: int, ranks: int) -> float:
        return (tokens + tokens**2 / 50) / ranks


class Texts(Dataset[dict[str, Tensor]]):
    """Few long samples and many short ones, some tokens of each without a label."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        self.lengths = [LONGEST - index if index % 6 == 0 else 3 + 7 * index % 31 for index in range(SAMPLES)]
        self.texts = [torch.randint(1, VOCABULARY, (n,), generator=generator) for n in self.lengths]

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = self.texts[index]
        return {"input_ids": ids, "labels": ids.masked_fill(torch.arange(len(ids)) < len(ids) // 3, -100)}


class Case(NamedTuple):
    world: int
    ring: int
    stage: int
    batch: int  # samples, or rows, of a replica
    documents: bool = False
    pack_tokens: int | None = None
    accumulation: int = 1
    most_tokens: int = 200
    measured: bool = False  # by the machine itself
    section: dict[str, Any] = {}  # noqa: RUF012 (never changed)


CASES = {
    "padded, ring 2, zero 0": Case(2, 2, 0, 6, measured=True),
    "packed, ring 2, zero 1": Case(2, 2, 1, 2, documents=True, pack_tokens=100),
    "documents, ring 2, zero 3": Case(2, 2, 3, 5, True, most_tokens=50, section={"verify_first_batch": True}),
    "padded, ring 4, zero 1, accumulation 2": Case(4, 4, 1, 5, accumulation=2),
    "packed, ring 4, zero 3, accumulation 2": Case(4, 4, 3, 2, True, 100, 2, section={"layout": "zigzag"}),
    "three samples on four ranks": Case(4, 4, 0, 3, documents=True),
    "one short sample, packed": Case(4, 4, 3, 1, documents=True),
    "one short sample, padded": Case(4, 4, 1, 1),
    "data 2 x ring 2, zero 2": Case(4, 2, 2, 4, section={"verify_first_batch": True}),
}


def options_of(case: Case, texts: Texts) -> dict[str, Any]:
    pack = {} if case.pack_tokens is None else {"pack_tokens": case.pack_tokens}
    return {"shuffle": True, "seed": 3, "lengths": texts.lengths, "most_tokens": case.most_tokens} | pack


@contextmanager
def timed_by_machine(case: Case) -> Iterator[None]:
    if case.measured:
        yield
        return
    with patch(MEASURED, lambda *_: Machine()):
        yield


class Step(NamedTuple):
    losses: list[float]
    gradients: dict[str, Tensor]
    rings: list[int]  # size of this rank's ring in each batch
    rates: Any = None  # what the job measured, if it did


def steps_on_ring(rank: int, world_size: int, cases: dict[str, Case]) -> dict[str, Step]:
    return {name: _step_on_ring(rank, case) for name, case in cases.items()}


def _step_on_ring(rank: int, case: Case) -> Step:
    deepspeed, texts = start_deepspeed(), Texts()
    section = {"dynamic_ring": True, "pattern": {"documents": case.documents}} | case.section
    config = json_config(case.ring, case.batch, case.stage, ring_attention=section)
    config["gradient_accumulation_steps"] = case.accumulation
    model = build_model(SIZE, "sdpa")
    with timed_by_machine(case):
        engine = start_engine(model, config)
    result = Step([], {}, [], getattr(engine.ring.dynamic.times, "rates", None))
    for batch in islice(engine.ring.loader(texts, case.batch, **options_of(case, texts)), case.accumulation):
        loss = engine(**batch).loss
        engine.backward(loss)
        result.losses.append(float(engine.ring.mean_loss(loss)))
        result.rings.append(engine.ring.batches.current.mesh.ring_size)
        if engine.is_gradient_accumulation_boundary():
            result.gradients.update(
                {name: full_gradient(deepspeed, p) for name, p in engine.module.named_parameters()}
            )
        engine.step()
    return result if rank == 0 else result._replace(gradients={})


def pieces_of(case: Case, texts: Texts) -> Iterator[list[dict[str, Tensor]]]:
    """The samples of each batch of the world."""
    replicas = case.world // case.ring
    rows = None if case.pack_tokens is None else PackedRows(texts, texts.lengths, case.pack_tokens).rows
    batches = []
    for replica in range(replicas):
        lengths = texts.lengths if rows is None else None
        count = SAMPLES if rows is None else len(rows)
        order = SampleOrder(
            count, case.batch, (replica, replicas), shuffle=True, seed=3, drop_last=False, lengths=lengths
        )
        batches.append(list(order))
    for of_replicas in zip(*batches, strict=True):
        indices = [index for item in of_replicas for index in item]
        if rows is None:
            yield [texts[index] for index in indices]
        else:
            yield [
                {key: value[piece.start : piece.stop] for key, value in texts[piece.document].items()}
                for index in indices
                for piece in rows[index]
            ]


def step_alone(case: Case) -> Step:
    """Each sample by itself, on one process."""
    model, result = build_model(SIZE, "sdpa"), Step([], {}, [])
    for samples in islice(pieces_of(case, Texts()), case.accumulation):
        counted = sum(int((sample["labels"][1:] != -100).sum()) for sample in samples)
        total = 0.0
        for sample in samples:
            logits = model(input_ids=sample["input_ids"][None]).logits[0, :-1]
            loss = cross_entropy(logits, sample["labels"][1:], ignore_index=-100, reduction="sum") / counted
            (loss / case.accumulation).backward()
            total += float(loss.detach())
        result.losses.append(total)
    result.gradients.update({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    return result


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.day("4")
def test_gradients_are_those_of_one_process(rank_pool, world):
    cases = {name: case for name, case in CASES.items() if case.world == world}
    by_rank = rank_pool(world).run(steps_on_ring, cases, timeout_s=300)
    sizes = set()
    for name, case in cases.items():
        expected = step_alone(case)
        for result in by_rank:
            assert result[name].losses == pytest.approx(expected.losses, rel=1e-5), name
            sizes |= set(result[name].rings)
            assert (result[name].rates is not None) == case.measured
            assert result[name].rates == by_rank[0][name].rates, f"{name}: ranks would divide differently"
        check_gradients(by_rank[0][name].gradients, expected.gradients, 1e-5)
    assert sizes >= {1, 2}, f"rings of {sizes} ranks only"


ROPE = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 8.0}


def sharp_model() -> torch.nn.Module:
    """Whose attention depends on positions so much that its loss tells their scale."""
    model = build_model(SIZE, "sdpa", max_position_embeddings=16, rope_parameters=ROPE)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(10)
    return model


def losses_by_length(rank: int, world_size: int) -> list[float]:
    """Losses of batches whose longest sample scales the rotary embedding of all, on one ring or another."""
    start_deepspeed()
    texts, result = Texts(), []
    config = json_config(world_size, 6, 0, ring_attention={"dynamic_ring": True})
    model = sharp_model()
    with patch(MEASURED, lambda *_: Machine()):
        engine = ds_ring.initialize(model=model, config=config)[0]
    loader = engine.ring.loader(texts, 6, shuffle=True, seed=3, lengths=texts.lengths, most_tokens=200)
    with torch.no_grad():
        for batch in loader:
            result.append(float(engine.ring.mean_loss(engine(**batch).loss)))
    return result


@pytest.mark.situation("models", "samples of other lengths scale positions")
def test_the_longest_sample_of_a_batch_scales_positions_on_all_rings(rank_pool):
    texts = Texts()
    model = sharp_model()
    order = SampleOrder(SAMPLES, 6, (0, 1), shuffle=True, seed=3, drop_last=False, lengths=texts.lengths)
    with torch.no_grad():
        expected = [float(model(**padded([texts[index] for index in indices])).loss) for indices in order]
    for result in rank_pool(2).run(losses_by_length):
        assert result == pytest.approx(expected, rel=2e-6)


def session_with_rings(ring_size: int, documents: bool) -> RingSession:
    session = forking_session(ring_size, dynamic_ring=True, pattern={"documents": documents})
    session.dynamic.rings, session.dynamic.times = SubRings(session.run_mesh), Machine()
    return session


def resumed_in_mid_epoch(rank: int, world_size: int) -> list[set[int]]:
    """Two batches of an epoch, and all that is left by a loader that gets their state; by workers, too."""
    texts, sizes = Texts(), []
    for documents, workers in ((False, 0), (True, 2)):
        session = session_with_rings(world_size, documents)
        whole, part, resumed = (
            session.loader(texts, 5, shuffle=True, lengths=texts.lengths, num_workers=workers)
            for _ in range(3)
        )
        epoch = []
        for batch in whole:
            epoch.append({key: value.clone() for key, value in batch.items()})
            current = session.batches.current
            sizes.append({current.mesh.ring_size})
            assert session.mesh is current.mesh and session.run_mesh.ring_size == world_size
            gathered = session.gather(batch["input_ids"][..., None].float())
            assert gathered.shape[1] == current.layout.tokens
        assert len(epoch) == len(whole) == 5
        assert len(list(islice(iter(part), 2))) == 2
        resumed.load_state_dict(part.state_dict())
        for batch, expected in zip(resumed, epoch[2:], strict=True):
            assert batch.keys() == expected.keys()
            assert all(torch.equal(batch[key], expected[key]) for key in batch)
        assert resumed.epoch == 1
    return sizes


def test_an_epoch_goes_on_where_it_was(rank_pool):
    by_rank = rank_pool(2).run(resumed_in_mid_epoch, timeout_s=120)
    assert {size for sizes in by_rank for item in sizes for size in item} == {1, 2}


class Spoiled(Texts):
    """A sample that is not what was told, wherever it is read."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample = super().__getitem__(index)
        if index != 7:
            return sample
        if self.how == "shorter":
            return {key: value[:-1] for key, value in sample.items()}
        if self.how == "positions":
            return sample | {"position_ids": torch.arange(len(sample["labels"]))}
        return {"input_ids": sample["input_ids"]}


def refused(rank: int, world_size: int) -> dict[str, str]:
    session, texts = session_with_rings(2, False), Texts()
    plain = forking_session(2)
    second = [length + (index == 8 and rank) for index, length in enumerate(texts.lengths)]
    return catch_refusals(
        {
            "no lengths": lambda: session.loader(texts, 4),
            "collate_fn": lambda: session.loader(texts, 4, lengths=texts.lengths, collate_fn=dict),
            "most_tokens": lambda: session.loader(texts, 4, lengths=texts.lengths, most_tokens=0),
            "most_tokens alone": lambda: plain.loader(texts, 4, lengths=texts.lengths, most_tokens=10),
            "other lengths": lambda: list(session.loader(texts, 4, lengths=second)),
            **{
                how: lambda how=how: list(session.loader(Spoiled(how), 4, lengths=texts.lengths))
                for how in ("shorter", "positions", "no labels")
            },
            "no configuration": lambda: _start_own(),
            "compile": lambda: _start_compiled(),
        }
    )


def _start_own() -> None:
    start_engine(torch.nn.Linear(4, 4), json_config(2, 1, 0, ring_attention={"dynamic_ring": True}))


def _start_compiled() -> None:
    config = json_config(2, 1, 0, ring_attention={"dynamic_ring": True})
    with patch(MEASURED, lambda *_: Machine()):
        engine = start_engine(build_model(SIZE, "sdpa"), config)
    engine.compile(backend="ds_ring")


# The error and words of the rank that has the fault, and whether the other one only hears of it.
REFUSED = {
    "no lengths": ("RingConfigError", "expected lengths=", False),
    "collate_fn": ("RingConfigError", "expected no collate_fn", False),
    "most_tokens": ("RingConfigError", "most_tokens: expected a whole number", False),
    "most_tokens alone": ("RingConfigError", 'expected "dynamic_ring": true', False),
    "other lengths": ("RingMismatchError", "lengths of the samples", False),
    "shorter": ("RingShapeError", "sample 7: input_ids: ", True),
    "positions": ("RingPatternError", "position_ids in sample 7", True),
    "no labels": ("RingShapeError", "in each sample", True),
    "no configuration": ("RingConfigError", "Linear without layers", False),
    "compile": ("RingConfigError", "false in a compiled graph", False),
}


def test_what_does_not_go_together_is_refused_on_every_rank(rank_pool):
    by_rank = rank_pool(2).run(refused, timeout_s=120)
    for name, (kind, words, heard) in REFUSED.items():
        texts = [result[name] for result in by_rank]
        faults = [text for text in texts if text.startswith(kind) and words in text]
        others = [
            text for text in texts if text.startswith("RingMismatchError") and "refused its batch" in text
        ]
        assert faults and len(faults) + (len(others) if heard else 0) == 2, f"{name}: {texts}"
