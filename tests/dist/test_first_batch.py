"""`"verify_first_batch": true` on two real ranks: passes on a right ring, raises on a wrong one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import ds_ring
from ds_ring.engines.first_batch.first_batch import Numbers, compare_outputs
from tests.dist.deepspeed_ranks import (
    Size,
    build_batch,
    build_model,
    json_config,
    listen,
    start_deepspeed,
    start_engine,
    take_step,
)
from tests.dist.test_ring_use import Own, a_module_on_the_mesh, of_the_session

SIZE = Size(hidden=32, layers=2, tokens=45, samples=2)


def train(rank: int, world_size: int, stage: int, section: dict[str, Any], fault: str = "") -> Any:
    """Two steps; returns their losses, the weights after them, and random numbers."""
    deepspeed = start_deepspeed()
    model = build_model(SIZE, "sdpa")
    engine = start_engine(model, json_config(world_size, SIZE.samples, stage, ring_attention=section))
    if fault == "checkpointing comes later":  # no fault: (the copy had its flag, and no function)
        model.gradient_checkpointing_enable()
    losses = []
    with silently_wrong(fault):
        for _ in range(2 * engine.gradient_accumulation_steps()):
            losses.append(take_step(engine, build_batch(SIZE)))
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        weights = [p.detach().clone() for p in engine.module.parameters()]
    return losses, weights, torch.rand(3)


@contextmanager
def silently_wrong(fault: str) -> Iterator[None]:
    """Seed an error that no shape and no dtype tells."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    from ds_ring.data.batch_sharding import BatchSharding

    rotate, attention, calls = LlamaRotaryEmbedding.forward, BatchSharding.attention, []

    def from_zero(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        return rotate(self, x, torch.arange(x.shape[1])[None])

    def every_other(self: BatchSharding, *requested: Any) -> Any:
        calls.append(requested)
        right = attention(self, *requested)
        lost = torch.distributed.get_rank() == 1 and len(calls) % 2 == 0
        return (lambda q, k, v, *others: right(q, k, v * 0, *others)) if lost else right

    if fault == "local positions":
        LlamaRotaryEmbedding.forward = from_zero
    elif fault == "lost payload":
        BatchSharding.attention = every_other
    try:
        yield
    finally:
        LlamaRotaryEmbedding.forward, BatchSharding.attention = rotate, attention


def test_checkpointing_may_be_enabled_after_initialize(rank_pool: Any) -> None:
    plain = rank_pool(2).run(train, 1, {})
    later = rank_pool(2).run(train, 1, {"verify_first_batch": True}, "checkpointing comes later")
    for (losses, _, _), (expected, _, _) in zip(later, plain, strict=True):
        assert losses == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.day("3")
def test_a_right_ring_trains_on_as_if_nothing_was_verified(rank_pool, stage):
    plain = rank_pool(2).run(train, stage, {})
    verified = rank_pool(2).run(train, stage, {"verify_first_batch": True})
    for (losses, weights, random), (others, other_weights, other_random) in zip(verified, plain, strict=True):
        assert losses == others
        assert all(torch.equal(a, b) for a, b in zip(weights, other_weights, strict=True))
        assert torch.equal(random, other_random)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize(
    ("fault", "layer"),
    [("local positions", "layer model.layers.0"), ("lost payload", "layer model.layers.1")],
)
@pytest.mark.covering(1)
def test_a_silent_error_is_raised_on_every_rank(rank_pool, fault, layer, stage):
    # "check_modules" would find the first one before.
    section = {"verify_first_batch": True, "check_modules": False, "layout": "contiguous"}
    for outcome in rank_pool(2).collect(train, stage, section, fault, grace_s=30):
        assert outcome.error_type == "RingVerifyError", outcome.report
        assert layer in outcome.message
        assert "gradient model." in outcome.message


def test_outputs_of_other_shapes_are_not_broadcast():
    one, two = (Numbers(torch.ones(1, tokens, 2)) for tokens in (1, 2))
    assert [x.error for x in compare_outputs(two, one)] == [float("inf")]


def train_own(rank: int, world_size: int, attend: Any, stage: int, fault: str = "") -> None:
    """A module of one's own, a loss of the training loop's own, two micro-batches, bfloat16 at ZeRO 2."""
    model = Own(attend)
    model.table = torch.nn.Parameter(torch.arange(2), requires_grad=False)  # integers, before all others
    changes = {"bf16": {"enabled": True}} if stage == 2 else {}
    config = json_config(
        2, 2, stage, gradient_accumulation_steps=2, ring_attention={"verify_first_batch": True}, **changes
    )
    engine = start_engine(model, config)
    model.session = engine.ring
    with silently_wrong(fault):
        for _ in range(2):
            batch = engine.ring.shard_batch(build_batch(SIZE))
            logits = engine(input_ids=batch["input_ids"])
            engine.backward(engine.ring.loss(logits, batch).backward_loss)
            engine.step()


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.day("3")
def test_a_module_of_ones_own_is_compared(rank_pool, stage):
    rank_pool(2).run(train_own, of_the_session, stage)
    for outcome in rank_pool(2).collect(train_own, of_the_session, stage, "lost payload", grace_s=30):
        assert outcome.error_type == "RingVerifyError", outcome.report


def train_by_another_loss(rank: int, world_size: int, loss: str) -> list[str]:
    """Return the warnings of a step whose loop computes its loss of the logits."""
    model = Own(of_the_session)
    changes = {"bf16": {"enabled": True}} if loss == "bfloat16" else {}
    config = json_config(2, 2, 1, gradient_accumulation_steps=2, ring_attention={"verify_first_batch": True})
    engine = start_engine(model, config | changes)
    model.session = engine.ring
    with listen("ds_ring.engines.first_batch.first_batch") as texts:
        for _ in range(4):
            batch = engine.ring.shard_batch(build_batch(SIZE))
            logits = engine(input_ids=batch["input_ids"])
            engine.backward(LOSSES[loss][0](engine.ring.loss(logits, batch).backward_loss, logits, batch))
            engine.step()
    return [text for text in texts if "the loss of your loop" in text]


def cross_entropy(logits: Any, labels: Any, items: Any = None) -> Any:
    reduction = "mean" if items is None else "sum"
    loss = torch.nn.functional.cross_entropy(
        logits.float().flatten(0, 1), labels.flatten(), reduction=reduction
    )
    return loss if items is None else loss / items


# Of the loss of ds_ring, the logits and the batch, a loss; what is said of it.
LOSSES: dict[str, tuple[Any, str]] = {
    "right": (lambda loss, logits, batch: loss, ""),
    "bfloat16": (lambda loss, logits, batch: loss, ""),
    "by items": (
        lambda loss, logits, batch: cross_entropy(logits, batch["shift_labels"], batch["num_items_in_batch"]),
        "",
    ),
    "local mean": (
        lambda loss, logits, batch: cross_entropy(logits, batch["shift_labels"]),
        "ranks weight a token by ",
    ),
    "shifted twice": (
        lambda loss, logits, batch: cross_entropy(
            logits[:, :-1], batch["shift_labels"][:, 1:], batch["num_items_in_batch"]
        ),
        "its gradient differs by ",
    ),
    "of squares": (
        lambda loss, logits, batch: logits[batch["shift_labels"] != -100].square().mean(),
        "",
    ),
    "undivided": (lambda loss, logits, batch: loss * 2, "its gradient is 2 times as large"),
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.day("right", "local mean", "shifted twice")
def test_another_loss_of_the_loop_is_named_once(rank_pool, loss):
    by_rank = rank_pool(2).run(train_by_another_loss, loss)
    expected = LOSSES[loss][1]
    assert by_rank[1] == [] and len(by_rank[0]) == bool(expected)
    assert all(expected in text and "call engine.ring.loss" in text for text in by_rank[0])


def train_held(rank: int, world_size: int, before: bool) -> None:
    """A module that has a RingAttention, made before the engine on a mesh of its own, or after it."""
    model = Own(a_module_on_the_mesh)
    pattern, section = ds_ring.Causal(), {"layout": "zigzag", "verify_first_batch": True}
    if before:
        mesh = ds_ring.RingMesh.from_world(2)
        model.ring = ds_ring.RingAttention(pattern, mesh=mesh, layout="zigzag")
    engine = start_engine(model, json_config(2, 2, 1, ring_attention=section))
    if not before:
        model.ring = ds_ring.RingAttention(pattern, mesh=engine.ring.mesh, layout="zigzag")
    batch = engine.ring.shard_batch(build_batch(SIZE))
    engine.backward(engine.ring.loss(engine(input_ids=batch["input_ids"]), batch).backward_loss)
    engine.step()


@pytest.mark.parametrize("before", [True, False])
def test_a_module_that_holds_a_mesh_is_refused_at_once(rank_pool, before):
    for outcome in rank_pool(2).collect(train_held, before, grace_s=30):  # below hop_timeout_seconds
        assert outcome.error_type == "RingVerifyError", outcome.report
        assert "a RingAttention, or a mesh that was read before, keeps that mesh" in outcome.message
        assert "call engine.ring.attention()" in outcome.message and "the first name" not in outcome.message


def start(rank: int, world_size: int, dropout: float, train: bool) -> None:
    start_deepspeed()
    import ds_ring

    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(dropout))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1) if train else None
    config = json_config(2, 2, 0, ring_attention={"verify_first_batch": True})
    ds_ring.initialize(model=model, optimizer=sgd, config=config)


@pytest.mark.parametrize(
    ("dropout", "train", "reason"), [(0.1, True, "got 1.p = 0.1"), (0.0, False, "expected an optimizer")]
)
def test_what_cannot_be_verified_is_refused(rank_pool, dropout, train, reason):
    for outcome in rank_pool(2).collect(start, dropout, train, grace_s=30):
        assert outcome.error_type == "RingConfigError", outcome.report
        assert reason in outcome.message


def train_family(rank: int, world_size: int, family: str, stage: int, packed: bool) -> None:
    """A step of a small model of transformers."""
    from ds_ring_launcher.check.small_model import build, read_config, shrink

    model = build(shrink(read_config(family), SIZE.tokens), "causal-lm", 0)
    section = {"verify_first_batch": True, "pattern": {"documents": packed}}
    engine = start_engine(model, json_config(world_size, SIZE.samples, stage, ring_attention=section))
    ids_BT = torch.randint(1, 40, (SIZE.samples, SIZE.tokens), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids_BT, "labels": ids_BT}
    if packed:
        batch["document_ids"] = (torch.arange(SIZE.tokens) // 20).expand(SIZE.samples, -1)
    engine.backward(engine(**engine.ring.shard_batch(batch)).loss)
    engine.step()


# Tied weights (two of them), keys that layers choose, layers that compute attention by themselves, recurrences.
FAMILIES = (
    "gpt2", "lfm2", "deepseek_v32", "deepseek_v4", "minimax_m3_vl_text", "doge", "mpt", "falcon", "gpt_neo",
    "recurrent_gemma", "zaya", "kimi_linear",
)  # fmt: skip


@pytest.mark.day("3-gpt2")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("stage", [0, 3])
def test_layers_of_any_kind_are_compared(rank_pool, family, stage):
    """Each of them raised a false alarm: the copy had another matrix of logits, or code of the ring."""
    rank_pool(2).run(train_family, family, stage, False)


@pytest.mark.parametrize("family", ["mamba2", "deepseek_v32", "mpt"])
@pytest.mark.day("mamba2")
def test_documents_that_a_models_own_code_need_not_know_are_refused(rank_pool, family):
    for outcome in rank_pool(2).collect(train_family, family, 0, True, grace_s=30):
        assert outcome.error_type == "RingConfigError", outcome.report
        assert "a pattern that the model's own code knows" in outcome.message
