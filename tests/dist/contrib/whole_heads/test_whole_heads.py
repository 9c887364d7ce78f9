"""Delta rules on Ulysses ranks, by heads and by a scan: losses and every gradient of one process, in float64."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from ds_ring import Causal, make_layout
from ds_ring.comm.exchange import Exchange
from ds_ring.contrib.whole_heads.scan import HeadContext
from ds_ring.errors import RingConfigError, RingMismatchError, RingShapeError
from ds_ring.layers.scan.sequence_runs import pieces
from ds_ring_launcher.check.rounding import InFloat64, in_float64
from ds_ring_launcher.check.small_model import build, read_config, shrink
from ds_ring_launcher.plan.other_layers import LayerSetting, Recurrence, read_kinds, sent_by
from tests.dist.deepspeed_ranks import Batch, Run
from tests.dist.family_ranks import attached, gradients_of, start_session, train_on_ring
from tests.dist.harness import Pool
from tests.reference import relative_error

TOKENS, SAMPLES = 61, 2
LENGTHS = (23, 9, 29)  # of packed documents


def model_of(family: str, **changes: int) -> Any:
    config = shrink(read_config(family), TOKENS, 2, {})
    config.update(changes)
    return in_float64(build(config, "causal-lm", 0)).eval()


def batch_of(packed: bool) -> Batch:
    drawn = torch.Generator().manual_seed(3)
    ids = torch.randint(5, 50, (SAMPLES, TOKENS), generator=drawn)
    labels = ids.masked_fill(torch.rand(ids.shape, generator=drawn) < 0.3, -100)
    batch = {"input_ids": ids, "labels": labels}
    documents = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    return batch | ({"document_ids": documents.expand(SAMPLES, -1)} if packed else {})


def alone(family: str, packed: bool) -> Run:
    """Each document by itself, with transformers' own functions and no ring."""
    model, batch, parts, labelled = model_of(family), batch_of(packed), [], 0
    with InFloat64():
        lengths = LENGTHS if packed else (TOKENS,)
        for ids, labels in zip(
            *(batch[key].split(lengths, 1) for key in ("input_ids", "labels")), strict=True
        ):
            logits, wanted = model(ids, use_cache=False).logits[:, :-1], labels[:, 1:]
            parts.append(torch.nn.functional.cross_entropy(logits.mT, wanted, reduction="sum"))
            labelled += int((wanted != -100).sum())
        loss = torch.stack(parts).sum() / labelled
        loss.backward()
    return Run([loss.item()], gradients_of(model))


def on_ring(
    rank: int, world_size: int, family: str, ulysses: int, packed: bool, by_heads: bool, fault: str = ""
) -> tuple[Run, int]:
    """The same on a ring, and how many scans of whole heads there were."""
    section = {"ulysses_size": ulysses, "pattern": {"documents": packed}}
    session = start_session(world_size, **section)
    model = attached(model_of(family), session)
    if by_heads:
        session.states_by_heads()
    contexts = list[HeadContext]()
    built, masks = HeadContext.__post_init__, HeadContext.masks

    def counted(self: HeadContext) -> None:
        built(self)
        contexts.append(self)
        if fault == "documents":  # states pass from one document to the next
            self.pieces = pieces(self.layout, 1, self.mesh.ring_rank, None)

    HeadContext.__post_init__ = counted  # type: ignore[method-assign]
    if fault == "states":  # none passes through a run of a ring rank
        HeadContext.masks = lambda self, like: (0 * masks(self, like)[0], masks(self, like)[1])  # type: ignore[method-assign]
    try:
        with InFloat64():
            return train_on_ring(model, session, [batch_of(packed)]), len(contexts)
    finally:
        HeadContext.__post_init__, HeadContext.masks = built, masks  # type: ignore[method-assign]


def largest(got: Run, want: Run) -> float:
    assert got.gradients.keys() == want.gradients.keys()
    errors = [relative_error(got.gradients[name], entry) for name, entry in want.gradients.items()]
    return max(*errors, abs(got.losses[0] / want.losses[0] - 1))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("by_heads", [False, True])
@pytest.mark.parametrize(("world_size", "ulysses"), [(2, 2), (4, 2)])
@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text", "kimi_linear"])
@pytest.mark.covering(1)
def test_losses_and_gradients_are_those_of_one_process(
    rank_pool: Pool, family: str, world_size: int, ulysses: int, by_heads: bool, packed: bool
) -> None:
    want = alone(family, packed)
    most = 1e-6 if family == "kimi_linear" else 1e-9  # Kimi's gates are float32 in any case
    for got, contexts in rank_pool(world_size).run(on_ring, family, ulysses, packed, by_heads):
        assert largest(got, want) < most
        assert (contexts > 0) == by_heads


@pytest.mark.parametrize(("fault", "packed"), [("documents", True), ("states", False)])
def test_states_that_pass_wrongly_are_found(rank_pool: Pool, fault: str, packed: bool) -> None:
    want = alone("qwen3_next", packed)
    for got, _ in rank_pool(4).run(on_ring, "qwen3_next", 2, packed, True, fault):
        assert largest(got, want) > 1e-3


def refused(rank: int, world_size: int, what: str) -> str:
    session = start_session(world_size, ulysses_size=1 if what == "ring" else 2)
    if what == "llama":
        attached(model_of("llama"), session)
    few = {"linear_num_value_heads": 3, "linear_num_key_heads": 3} if what == "heads" else {}
    try:
        if what != "one rank" or rank:
            session.states_by_heads()
        model = attached(model_of("qwen3_next", **few), session)
        model(**session.shard_batch(batch_of(False)))
    except (RingConfigError, RingShapeError, RingMismatchError) as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("ring", "RingConfigError: states_by_heads: expected Ulysses ranks, got none"),
        ("llama", "RingConfigError: states_by_heads: expected a model with delta rules, got one without"),
        ("heads", "expected 31 tokens and a multiple of 2 heads, got 31 and 3; leave states_by_heads out"),
        ("one rank", "RingMismatchError"),
    ],
)
def test_it_is_refused(rank_pool: Pool, what: str, says: str) -> None:
    for text in rank_pool(2).run(refused, what):
        assert says in text, text


def counted() -> int:
    """Bytes that all exchanges of this process have sent."""
    return sum(entry.counters.bytes_sent for entry in gc.get_objects() if type(entry) is Exchange)


def sent(rank: int, world_size: int, by_heads: bool) -> int:
    """Bytes that this rank sends in both passes of one small model's step, in float32."""
    session = start_session(world_size, ulysses_size=2)
    config = shrink(read_config("qwen3_next"), TOKENS, 2, {})
    model = attached(build(config, "causal-lm", 0).eval(), session)
    if by_heads:
        session.states_by_heads()
    before = counted()
    train_on_ring(model, session, [batch_of(False)])
    return counted() - before


def of_the_plan(world_size: int) -> list[int]:
    """How many bytes more each rank sends by heads than by a scan, by the plan's formulas."""
    config = shrink(read_config("qwen3_next"), TOKENS, 2, {})
    kinds = [entry for entry in read_kinds(config.to_dict(), config.layer_types) if entry is not None]
    keys = 2 * config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    swapped = keys + 2 * values + 2 * config.linear_num_value_heads  # q, k, v, the outputs, beta and g
    layout = make_layout("zigzag", tokens=TOKENS, ring_size=world_size // 2, multiple_of=2, pattern=Causal())
    result = []
    for rank in range(world_size):
        total = 0
        for kind in kinds:
            assert isinstance(kind, Recurrence)
            local = SAMPLES * layout.local_tokens // 2 * swapped * 4
            half = kind._replace(before=0, state=kind.state // 2, transition=kind.transition // 2)
            cut = LayerSetting(layout, 2, SAMPLES, 4, Causal())
            scan = sent_by(kind._replace(before=0), cut, rank)
            rest = sent_by(half, cut._replace(parts=1), rank // 2) if world_size > 2 else []
            total += 2 * (local // 2)
            total += sum(entry.forward + entry.backward for entry in rest)
            total -= sum(entry.forward + entry.backward for entry in scan)
        result.append(total)
    return result


@pytest.mark.parametrize("world_size", [2, 4])
def test_the_bytes_are_those_of_the_plan(rank_pool: Pool, world_size: int) -> None:
    by_scan, by_heads = (rank_pool(world_size).run(sent, way) for way in (False, True))
    assert [a - b for a, b in zip(by_heads, by_scan, strict=True)] == of_the_plan(world_size)
