"""Mistakes of the first hour: each error names its cause, on every rank, and says what to do."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.dist.deepspeed_ranks import (
    Size,
    build_batch,
    build_model,
    json_config,
    start_deepspeed,
    start_engine,
)
from tests.dist.harness import run_ranks_collect

SIZE = Size(hidden=16, layers=1, tokens=24, samples=2)


class Head(nn.Module):
    """A model of one's own on the ring, and a head that reads the token of a number."""

    def __init__(self, selects: bool) -> None:
        super().__init__()
        self.embed, self.head, self.ring = nn.Embedding(61, 16), nn.Linear(16, 1), None
        self.selects = selects

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        ring: Any = self.ring
        x = self.embed(input_ids)[:, None]
        x = ring.attention()(x, x, x)[:, 0]
        return self.head(x.select(1, SIZE.tokens - 1) if self.selects else x[:, SIZE.tokens - 1])


def mistake(rank: int, world_size: int, kind: str) -> None:
    model: Any = Head(kind == "select") if kind in ("index", "select") else build_model(SIZE, "sdpa")
    engine = start_engine(model, json_config(world_size, 2, 0))
    model.ring = engine.ring
    if kind.startswith("ragged"):
        data: Any = [{"input_ids": torch.ones(n).long(), "labels": torch.ones(n).long()} for n in (12, 17)]
        inputs = engine.ring.loader(data, 2) if kind == "ragged" else engine.ring.wrap(DataLoader(data, 2))
        next(iter(inputs))
    whole = build_batch(SIZE)
    if kind == "token id":
        whole["input_ids"] += 10**6
    if kind == "a RingLoss, backward":
        labelled = engine.ring.shard_batch(whole)
        engine.backward(engine.ring.loss(engine(**labelled).logits, labelled))
    batch = engine.ring.shard_batch({"input_ids": whole["input_ids"]})
    output = engine(input_ids=batch["input_ids"], position_ids=batch["position_ids"])
    if kind == "no labels, backward":
        engine.backward(output.loss)
    if kind == "no labels, logged":
        engine.ring.mean_loss(output.loss)
    engine.ring.loss(output.logits, batch)


@pytest.mark.situation("first hour", "a mistake of a first script")
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("no labels, backward", "engine.backward: expected a model's loss, got NoneType; give labels"),
        ("a RingLoss, backward", "engine.backward: expected a tensor, got what engine.ring.loss returns; pass loss."),
        ("no labels, logged", "mean_loss: expected a model's loss, got NoneType; give labels"),
        ("no labels, ring.loss", "loss: expected labels, got ['input_ids'"),
        ("ragged", "expected one length, got 12, 17 tokens; give lengths="),
        ("ragged, wrapped", "expected one length, got 12, 17 tokens"),
        ("index", "a rank has 12 of 24 tokens"),
        ("select", "a rank has 12 of 24 tokens"),
    ],
)  # fmt: skip
def test_a_mistake_is_named_on_every_rank(rank_pool: Any, kind: str, words: str) -> None:
    for outcome in rank_pool(2).collect(mistake, kind, grace_s=30):
        assert outcome.error_type == "RingShapeError" and words in outcome.message, outcome.report


def lists(rank: int, world_size: int) -> dict[str, str]:
    """What a user hears who passes Python lists, or what else a script has at hand, where tensors are due."""
    engine = start_engine(build_model(SIZE, "sdpa"), json_config(world_size, 2, 0))
    ring, whole = engine.ring, {"input_ids": build_batch(SIZE)["input_ids"]}
    whole["labels"] = whole["input_ids"]
    ids, batch = whole["input_ids"].tolist(), dict(ring.shard_batch(whole))
    logits, losses = torch.ones(2, 12, 50), torch.ones(2, 12)
    listed = {name: x.tolist() for name, x in batch.items()}
    calls: dict[str, Callable[[], Any]] = {
        "shard ids": lambda: ring.shard_batch({"input_ids": ids}),
        "shard labels": lambda: ring.shard_batch(whole | {"labels": ids}),
        "shard no names": lambda: ring.shard_batch(ids),
        "wrap": lambda: next(iter(ring.wrap(DataLoader([{"input_ids": row} for row in ids], 2)))),
        "engine ids": lambda: engine(**batch | {"input_ids": ids}),
        "engine labels": lambda: engine(**batch | {"shift_labels": ids}),
        "engine positions": lambda: engine(**batch | {"position_ids": listed["position_ids"]}),
        "engine batch": lambda: engine(batch),
        "loss logits": lambda: ring.loss(logits.tolist(), batch),
        "loss output": lambda: ring.loss(engine(**batch), batch),
        "loss labels": lambda: ring.loss(logits, batch | {"shift_labels": listed["shift_labels"]}),
        "loss list": lambda: ring.loss(logits, ids),
        "loss tensor": lambda: ring.loss(logits, whole["labels"]),
        "logprobs list": lambda: ring.logprobs(engine, ids),
        "document_losses list": lambda: ring.document_losses(ids, batch),
        "document_losses batch": lambda: ring.document_losses(losses, ids),
    }
    said = {}
    for name, call in calls.items():
        try:
            call()
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"
    engine(**ring.shard_batch(whole))  # the ring is as before
    return said


@pytest.mark.situation("first hour", "Python lists where tensors are due")
def test_lists_are_named_and_not_printed(rank_pool: Any) -> None:
    """(Three of them were raw errors, and one printed every id.)"""
    tensor, by_name = (
        "expected a tensor, got list; convert it with torch.as_tensor",
        "expected a batch by names",
    )
    words = {
        "shard ids": f"batch['input_ids']: {tensor}",
        "shard labels": f"batch['labels']: {tensor}",
        "shard no names": "batch: expected a mapping of names to tensors, got list",
        "wrap": f"batch['input_ids']: {tensor}",
        "engine ids": f"input_ids: {tensor}",
        "engine labels": f"shift_labels: {tensor}",
        "engine positions": f"position_ids: {tensor}",
        "engine batch": "got no tensor of [samples, tokens]; call engine(**engine.ring.shard_batch(batch))",
        "loss logits": "loss: expected logits [B, S, V], got list; pass output.logits",
        "loss output": "loss: expected logits [B, S, V], got CausalLMOutputWithPast; pass output.logits",
        "loss labels": f"loss: batch['shift_labels']: {tensor}",
        "loss list": f"loss: {by_name}, got list; pass all that engine.ring.shard_batch returned",
        "loss tensor": f"loss: {by_name}, got Tensor",
        "logprobs list": f"logprobs: {by_name}, got list",
        "document_losses list": f"document_losses: losses: {tensor}",
        "document_losses batch": f"document_losses: {by_name}, got list",
    }
    for said in rank_pool(2).run(lists):
        assert {*said} == {*words}
        for name, text in said.items():
            assert text.startswith("RingShapeError: ") and words[name] in text and len(text) < 250, (
                name,
                text,
            )


@pytest.mark.situation("first hour", "a token id above the vocabulary")
def test_a_token_id_above_the_vocabulary_is_no_index_of_the_sequence(rank_pool: Any) -> None:
    for outcome in rank_pool(2).collect(mistake, "token id", grace_s=30):
        assert outcome.error_type == "IndexError", outcome.report
        assert outcome.message == "index out of range in self", outcome.report


def numbered_by_itself(rank: int, world_size: int) -> None:
    """A model numbers the tokens of a shard from 0, whatever it is given."""
    model: Any = build_model(SIZE, "sdpa")
    positions = torch.arange(SIZE.tokens // world_size)[None]
    model.model.register_forward_pre_hook(
        lambda _, args, inputs: (args, inputs | {"position_ids": positions}), with_kwargs=True
    )
    engine = start_engine(model, json_config(world_size, 2, 0, ring_attention={"layout": "contiguous"}))
    engine(**engine.ring.shard_batch(build_batch(SIZE)))


@pytest.mark.situation("first hour", "a model of one's own that numbers its tokens")
def test_a_model_that_numbers_its_tokens_by_itself_is_named(rank_pool: Any) -> None:
    """By the second rank; the first one's tokens do begin at 0."""
    second, local = rank_pool(2).collect(numbered_by_itself, grace_s=30)
    assert local.error_type == "RingPatternError", local.report
    assert (
        "LlamaForCausalLM: expected position_ids in its LlamaModel, which numbers this rank's tokens"
        in local.message
    )
    assert second.error_type == "RingMismatchError" and "rank 1" in second.message, second.report


def without_a_launcher(rank: int, world_size: int) -> None:
    """As in a script that `python` runs: no process group, none of a launcher's variables, no mpi4py."""
    torch.distributed.destroy_process_group()
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    sys.modules["mpi4py"] = None  # type: ignore[assignment]
    start_deepspeed()
    import ds_ring

    config = {"train_batch_size": 1, "sequence_parallel_size": 1, "ring_attention": {}}
    ds_ring.initialize(model=torch.nn.Linear(1, 1), config=config)


@pytest.mark.situation("first hour", "python script.py without a launcher")
def test_a_script_without_a_launcher_hears_of_it() -> None:
    (result,) = run_ranks_collect(without_a_launcher, 1)
    assert result.error_type == "RingConfigError"
    assert "expected a process that a launcher has started" in result.message


def test_check_model_takes_no_script(tmp_path: Path) -> None:
    from ds_ring.errors import RingConfigError
    from launcher.check.small_model import read_config

    script = tmp_path / "plain.py"
    script.write_text("x = 1\n")
    with pytest.raises(RingConfigError, match=r"got the script .*plain\.py"):
        read_config(str(script))
