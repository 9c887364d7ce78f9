"""Inputs that models take otherwise than ids without padding: embeddings, padding on the left, on 2 ranks against one.

Lengths do not divide by the ranks, so that shards have padding slots. Models are small ones of `ds-ring check-model`,
in float64.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import ds_ring
from tests.dist import deepspeed_ranks, family_ranks
from tests.dist.deepspeed_ranks import (
    Run,
    Size,
    build_model,
    json_config,
    listen,
    start_deepspeed,
    train_on_ring,
)
from tests.dist.family_ranks import attached, gradients_of, start_session, train_alone
from tests.dist.harness import Pool, catch_refusal

SAMPLES, TOKENS, PADDED = 2, 23, 7
SIZE = Size(hidden=16, layers=1, tokens=29, samples=4)


class Case(NamedTuple):
    family: str
    head: str = "causal-lm"
    embeds: bool = False  # instead of ids
    foreign: bool = False  # one embedding is no row of the table
    side: str = ""  # of the padding of the first sample
    documents: bool = False
    refused: str = ""  # a part of the reason


CASES = {
    "gemma3n": Case("gemma3n_text", embeds=True),
    "gemma4": Case("gemma4_text", embeds=True),
    "gemma4, foreign": Case("gemma4_text", embeds=True, foreign=True, refused="expected rows of its embedding table"),
    "opt, left": Case("opt", side="left", documents=True),
    "opt, right": Case("opt", side="right"),
    "biogpt, left": Case("biogpt", side="left", documents=True),
    "classifier, left": Case("llama", "sequence-classification", embeds=True, side="left", documents=True),
    "classifier, right": Case("llama", "sequence-classification", embeds=True, side="right",
        refused="inputs_embeds with padding there; pad on the left"),
    "classifier, foreign padding": Case("llama", "sequence-classification", side="right", foreign=True,
        refused="padding with other ids than pad_token_id"),
}  # fmt: skip


def build(case: Case) -> Any:
    from ds_ring_launcher.check import small_model

    config = small_model.shrink(small_model.read_config(case.family), TOKENS)
    if case.head != "causal-lm":
        config.pad_token_id = 0
    return small_model.build(config, case.head, 0).double()


def batch_for(model: Any, case: Case) -> dict[str, Tensor]:
    """Padding has id 0; labels of the first tokens are left out, as those of a prompt."""
    ids = torch.randint(5, 80, (SAMPLES, TOKENS), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    if case.side:
        mask[0, slice(PADDED) if case.side == "left" else slice(-PADDED, None)] = 0
    ids = ids.masked_fill(mask == 0, 3 if case.foreign else 0)
    batch = {"input_ids": ids} | ({"attention_mask": mask} if case.side else {})
    if case.embeds:
        with torch.no_grad():
            batch["inputs_embeds"] = model.get_input_embeddings()(batch.pop("input_ids"))
            if case.foreign:
                batch["inputs_embeds"][0, 0] += 0.1
    if case.head == "causal-lm":
        batch["labels"] = ids.masked_fill(mask == 0, -100).index_fill(1, torch.arange(PADDED + 1), -100)
    else:
        batch["labels"] = torch.arange(SAMPLES)
    return batch


def on_the_ring(rank: int, world_size: int, case: Case) -> Run:
    model = build(case)
    batch = batch_for(model, case)
    session = start_session(world_size, world_size, pattern={"documents": case.documents})
    attached(model, session)
    if case.head == "causal-lm":
        loss = model(**session.shard_batch(batch)).loss
        mean = session.mean_loss(loss)
    else:
        labels = batch.pop("labels")
        loss = mean = model(**session.shard_batch(batch), labels=labels).loss
    loss.backward()
    return Run([float(mean.detach())], gradients_of(model, session.gradient_divisor))


@pytest.mark.day("gemma4", "opt, left", "biogpt, left", "classifier, left", "classifier, foreign padding")
@pytest.mark.situation(
    "inputs", "trained by inputs_embeds, or with padding that a model counts or reads in its own way"
)
@pytest.mark.parametrize("name", CASES)
def test_inputs_are_those_of_one_process_or_refused(rank_pool: Pool, name: str) -> None:
    case = CASES[name]
    if case.refused:
        for outcome in rank_pool(2).collect(on_the_ring, case, timeout_s=60):
            assert outcome.error_type in ("RingShapeError", "RingPatternError", "RingMismatchError")
            assert case.refused in outcome.message
        return
    model = build(case)
    expected = train_alone(model, [batch_for(model, case)])
    for got in rank_pool(2).run(on_the_ring, case):
        family_ranks.check(got, expected, least=1e-3)


def classified_on_the_left(rank: int, world_size: int) -> float:
    """How far the logits of a classifier are from one process, given embeddings with padding on the left."""
    deepspeed = start_deepspeed()
    ds_ring.enable()
    case = CASES["classifier, left"]
    model = build(case).float().eval()
    batch = batch_for(model, case)
    del batch["labels"]
    with torch.no_grad():
        expected = model(**batch).logits
    engine = deepspeed.initialize(model=model, config=json_config(world_size, SAMPLES, 0))[0]
    with torch.no_grad():
        return float((engine(**batch).logits - expected).abs().max())


@pytest.mark.situation(
    "padding", "gave a classifier embeddings with padding on the left, by ds_ring.enable()"
)
def test_a_classifier_reads_the_last_token_after_padding_was_moved(rank_pool: Pool) -> None:
    assert max(rank_pool(2).run(classified_on_the_left)) < 1e-5


def trained_on_the_left(rank: int, world_size: int, family: str) -> tuple[float, float, list[str]]:
    """How far loss and gradients are from one process on a stock collator's batch, without the shifted label there.

    And the warnings.
    """
    deepspeed = start_deepspeed()
    from ds_ring.data.batch import warn_about_shifted_padding

    ds_ring.enable()
    warn_about_shifted_padding.cache_clear()
    case = Case(family, side="left")
    model = build(case).float()
    batch = batch_for(model, case)
    batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    alone = copy.deepcopy(model)
    dropped = batch["labels"].clone()
    dropped[0, PADDED] = -100  # the first real token, which the last padding token would predict
    whole = alone(**batch | {"labels": dropped})
    whole.loss.backward()
    sgd = torch.optim.SGD(model.parameters(), lr=0.0)
    engine = deepspeed.initialize(model=model, optimizer=sgd, config=json_config(world_size, SAMPLES, 0))[0]
    with listen() as messages:
        for _ in range(2):
            loss = engine(**batch).loss
    engine.backward(loss)
    errors = [
        float(
            (deepspeed.utils.safe_get_full_grad(mine) - theirs.grad).norm()
            / theirs.grad.norm().clamp(min=1e-2)
        )
        for mine, theirs in zip(engine.module.parameters(), alone.parameters(), strict=True)
        if theirs.grad is not None
    ]
    return abs(float(loss - whole.loss)), max(errors), [line for line in messages if "labels" in line]


@pytest.mark.situation(
    "padding", "padded a batch on the left with a stock collator and trained on all of its tokens"
)
@pytest.mark.parametrize("family", ["llama", "opt"])
def test_the_label_that_the_shift_gives_padding_is_left_out_and_named(rank_pool: Pool, family: str) -> None:
    for loss, gradient, messages in rank_pool(2).run(trained_on_the_left, family):
        assert loss < 1e-5 and gradient < 1e-4
        assert len(messages) == 1 and "shift" in messages[0]


def build_subclass(kind: str) -> Callable[..., Any]:
    """A function that builds a Llama of a class of the user's, with the weights of the plain one."""
    from transformers import LlamaForCausalLM, LlamaModel, LlamaPreTrainedModel

    class Empty(LlamaForCausalLM):
        pass

    class WithHead(LlamaForCausalLM):
        """Returns what it inherits, by a forward of its own."""

        def forward(self, input_ids: Any = None, attention_mask: Any = None, **inputs: Any) -> Any:
            output = super().forward(input_ids, attention_mask=attention_mask, **inputs)
            output["logits"] = output.logits * 1
            return output

    class Remote(LlamaPreTrainedModel):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.model = LlamaModel(config)
            self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            self.post_init()

        def forward(
            self, input_ids: Any = None, attention_mask: Any = None, position_ids: Any = None,
            labels: Any = None, **inputs: Any,
        ) -> Any:  # fmt: skip
            from transformers.modeling_outputs import CausalLMOutput

            hidden = self.model(
                input_ids, attention_mask=attention_mask, position_ids=position_ids
            ).last_hidden_state
            logits, loss = self.lm_head(hidden), None
            if labels is not None:
                loss = self.loss_function(
                    logits=logits, labels=labels, vocab_size=self.config.vocab_size, **inputs
                )
            return CausalLMOutput(loss=loss, logits=logits)

    def build(size: Size, implementation: str, **changes: Any) -> Any:
        plain: Any = build_model(size, implementation, **changes)
        built = {"empty": Empty, "with a head": WithHead, "remote code": Remote}[kind](plain.config)
        built.load_state_dict(plain.state_dict(), strict=False)
        return built

    return build


def trained_subclass(rank: int, world_size: int, kind: str) -> Run:
    config = json_config(world_size, SIZE.samples, 0)
    return train_on_ring(rank, world_size, SIZE, config, 2, build=build_subclass(kind))


@pytest.mark.day("with a head")
@pytest.mark.situation(
    "modules", "trained a subclass of a model of transformers, or remote code, on padded batches"
)
@pytest.mark.parametrize("kind", ["empty", "with a head", "remote code"])
def test_a_subclass_is_what_it_inherits(rank_pool: Pool, kind: str) -> None:
    expected = deepspeed_ranks.train_alone(SIZE, 2)
    got = rank_pool(2).run(trained_subclass, kind)[0]
    assert got.losses == pytest.approx(expected.losses, rel=1e-5)
    for name, gradient in expected.gradients.items():
        assert torch.allclose(got.gradients[name], gradient, atol=1e-5), name


KEPT: dict[str, Any] = {
    "one": 1,
    "some": 5,
    "all": TOKENS,
    "places": torch.tensor([3, TOKENS - 1]),
    "places of each": torch.tensor([[9, 22], [0, 4]]),
    "mask": torch.arange(SAMPLES * TOKENS).view(SAMPLES, TOKENS) % 5 == 0,
}


def kept_logits(rank: int, world_size: int) -> tuple[dict[str, float], str]:
    """How far the logits are that stock keeps, and what a call with labels raises."""
    deepspeed = start_deepspeed()
    ds_ring.enable()
    case = Case("llama", side="left")
    model = build(case).float().eval()
    batch = batch_for(model, case)
    labels = batch.pop("labels")
    real = batch["attention_mask"].bool()
    with torch.no_grad():
        expected = {name: model(**batch, logits_to_keep=keep).logits for name, keep in KEPT.items()}
        every = model(**batch).logits
    engine = deepspeed.initialize(model=model, config=json_config(world_size, SAMPLES, 0))[0]
    errors = {}
    with torch.no_grad():
        for name, keep in KEPT.items():
            got = engine(**batch, logits_to_keep=keep).logits
            # of padding, which sees other tokens here, there is no right value
            shown = torch.isin(expected[name], every[real])
            assert got.shape == expected[name].shape, name
            errors[name] = float((got - expected[name])[shown].abs().max())
        refused = catch_refusal(engine, **batch, labels=labels, logits_to_keep=1)
        engine(**batch, labels=labels, logits_to_keep=0)
    return errors, refused


@pytest.mark.situation(
    "inputs", "asked a model under ds_ring.enable() for the logits of some tokens, logits_to_keep"
)
def test_the_kept_logits_are_those_of_one_process(rank_pool: Pool) -> None:
    for errors, refused in rank_pool(2).run(kept_logits):
        assert max(errors.values()) < 1e-5, errors
        assert "logits_to_keep: expected none, or all 23 tokens, with labels, got 1" in refused
