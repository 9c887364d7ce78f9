"""Modules around a transformers model: what reads across tokens is what one process computes, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce
from torch.nn import functional

from tests.dist.deepspeed_ranks import (
    Size,
    build_batch,
    build_model,
    json_config,
    listen,
    start_deepspeed,
    start_engine,
    train_by_sgd,
)

SIZE = Size(hidden=16, layers=1, tokens=29, samples=4)
STEPS = 2


class Wrapper(nn.Module):
    """A base model, and a head that each case computes its results with."""

    def __init__(self, labels: int = 1) -> None:
        super().__init__()
        model: Any = build_model(SIZE, "sdpa")
        self.base = model if isinstance(self, Penalized) else model.model
        torch.manual_seed(1)
        self.head = nn.Linear(SIZE.hidden, labels)
        self.ring: Any = None

    def hidden(self, input_ids: Tensor, position_ids: Tensor | None, mask: Tensor | None = None) -> Tensor:
        """Returns [B, S, H]."""
        return self.base(input_ids, attention_mask=mask, position_ids=position_ids).last_hidden_state


class LastToken(Wrapper):
    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, **_: Any) -> Tensor:
        return self.head(self.hidden(input_ids, position_ids)[:, -1])


class LastReal(Wrapper):
    """A reward model that looks for the last token that is no padding."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor | None = None) -> Any:
        hidden = self.hidden(input_ids, position_ids, attention_mask)
        last = attention_mask.sum(1) - 1
        return {"rewards": self.head(hidden[torch.arange(len(hidden)), last])}


class MaskedMean(Wrapper):
    def forward(
        self, input_ids: Tensor, position_ids: Tensor | None = None, attention_mask: Tensor | None = None
    ) -> tuple[Tensor]:
        hidden = self.hidden(input_ids, position_ids, attention_mask)
        weights = attention_mask[..., None].float()
        return (self.head((hidden * weights).sum(1) / weights.sum(1)),)


class Maximum(Wrapper):
    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        return self.head(self.hidden(input_ids, position_ids)).amax(1)


class AttentionPool(Wrapper):
    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        hidden = self.hidden(input_ids, position_ids)
        return (self.head(hidden).softmax(1) * hidden).sum(1)


class OneSum(Wrapper):
    """Sums of tokens alone: no rank has the others' part."""

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        return self.head(self.hidden(input_ids, position_ids)).sum(1) / 50


class Weighted(Wrapper):
    """Weights by the number of a token in the tensor."""

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        hidden = self.hidden(input_ids, position_ids)
        return self.head(hidden * torch.linspace(0, 1, hidden.shape[1])[:, None]).sum() / hidden.shape[1]


class Contrastive(Wrapper):
    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        pooled = functional.normalize(self.hidden(input_ids, position_ids).mean(1), dim=-1)
        return functional.cross_entropy(pooled @ pooled.T * 20, torch.arange(len(pooled)).flip(0))


class Penalized(Wrapper):
    """The model's own loss of tokens, and a penalty on the mean of its states."""

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, **inputs: Any) -> Tensor:
        output = self.base(
            input_ids, position_ids=position_ids, output_hidden_states=True, use_cache=False,
            **{key: x for key, x in inputs.items() if key != "attention_mask"},
        )  # fmt: skip
        return output.loss + 10 * output.hidden_states[-1].mean().square()


class Centred(Wrapper):
    """A result for each token, which depends on all of them."""

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        hidden = self.hidden(input_ids, position_ids)
        return self.head(hidden - hidden.mean(1, keepdim=True))


class TokenByNumber(Wrapper):
    """Reads a token that the shard of no rank is long enough for."""

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        return self.head(self.hidden(input_ids, position_ids)[:, SIZE.tokens - 3])


class Prompted(Wrapper):
    """Puts two learned tokens in front of the others."""

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        embedded = self.base.embed_tokens(input_ids)
        prompt = self.head.weight[:, :, None].expand(len(embedded), -1, 2).transpose(1, 2)
        base: Any = self.base
        states = base(inputs_embeds=torch.cat([prompt, embedded], 1), position_ids=position_ids)
        return self.head(states.last_hidden_state[:, -1])


class Shifts(Wrapper):
    """Shifts labels that came shifted."""

    def forward(self, input_ids: Tensor, labels: Tensor, position_ids: Tensor | None = None) -> Tensor:
        logits = self.head(self.hidden(input_ids, position_ids))[:, :-1]
        return functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())


class MeanLoss(Wrapper):
    def forward(self, input_ids: Tensor, shift_labels: Tensor, position_ids: Tensor | None = None) -> Tensor:
        logits = self.head(self.hidden(input_ids, position_ids))
        return functional.cross_entropy(logits.flatten(0, 1), shift_labels.flatten())


class TokenHead(Wrapper):
    """What every rank may do by itself: nothing is gathered."""

    def forward(
        self, input_ids: Tensor, position_ids: Tensor | None = None, attention_mask: Tensor | None = None
    ) -> Tensor:
        hidden = functional.layer_norm(self.hidden(input_ids, position_ids), (SIZE.hidden,))
        if attention_mask is not None:
            hidden = hidden * attention_mask.unsqueeze(-1)
        hidden = torch.cat([hidden, functional.gelu(hidden)], dim=-1)
        heads = hidden.view(*hidden.shape[:2], 2, -1).transpose(1, 2).softmax(-1).transpose(1, 2)
        return self.head(functional.dropout(heads.mean(2), 0.0)).float()


class TokenLoss(Wrapper):
    def forward(
        self,
        input_ids: Tensor,
        shift_labels: Tensor,
        num_items_in_batch: Tensor | float,
        position_ids: Tensor | None = None,
    ) -> Any:
        logits = self.head(self.hidden(input_ids, position_ids))
        counted = shift_labels != -100
        local = functional.cross_entropy(logits[counted], shift_labels[counted], reduction="sum")
        return {"loss": local / num_items_in_batch, "logits": logits}


class Gathers(Wrapper):
    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        hidden = self.hidden(input_ids, position_ids)
        return self.head((hidden if self.ring is None else self.ring.gather(hidden)).mean(1))


class SumsItself(Wrapper):
    """Adds up sums of tokens over the ranks by itself: it is left alone, with a warning."""

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        sums = self.hidden(input_ids, position_ids).sum(1)
        return self.head(all_reduce(sums)) / 50


def of_rewards(output: Any, batch: dict[str, Tensor], ring: Any) -> Tensor:
    """A loss of results of samples, the same on every rank."""
    rewards = next(iter(output.values())) if isinstance(output, dict) else output
    rewards = rewards[0] if isinstance(rewards, tuple) else rewards
    return (rewards - torch.linspace(-1, 1, rewards.numel()).view_as(rewards)).square().mean()


def as_it_is(output: Any, batch: dict[str, Tensor], ring: Any) -> Tensor:
    return output["loss"] if isinstance(output, dict) else output


def of_tokens(logits: Tensor, batch: dict[str, Tensor], ring: Any) -> Tensor:
    if ring is not None:
        return ring.loss(logits, batch).backward_loss
    return functional.cross_entropy(logits.flatten(0, 1), batch["shift_labels"].flatten())


Loss = Callable[[Any, dict[str, Tensor], Any], Tensor]
# the module, how many results its head has, the loss of the loop, and whether it runs on whole sequences
CASES: dict[str, tuple[type[Wrapper], int, Loss, bool]] = {
    "last token": (LastToken, 1, of_rewards, True),
    "last real token": (LastReal, 1, of_rewards, True),
    "mean by a mask": (MaskedMean, 1, of_rewards, True),
    "maximum": (Maximum, 1, of_rewards, True),
    "softmax over tokens": (AttentionPool, 1, of_rewards, True),
    "sum": (OneSum, 1, of_rewards, True),
    "weights by place": (Weighted, 1, as_it_is, True),
    "contrastive": (Contrastive, 1, as_it_is, True),
    "penalty beside a loss": (Penalized, 1, as_it_is, True),
    "centred": (Centred, 61, of_tokens, True),
    "mean loss": (MeanLoss, 61, as_it_is, True),
    "token by number": (TokenByNumber, 1, of_rewards, True),
    "prompt of its own": (Prompted, 1, of_rewards, True),
    "sums itself": (SumsItself, 1, of_rewards, False),
    "shifts labels": (Shifts, 61, as_it_is, True),
    "head on each token": (TokenHead, 61, of_tokens, False),
    "loss of tokens": (TokenLoss, 61, as_it_is, False),
    "gathers itself": (Gathers, 1, of_rewards, False),
}

NOT_EXACT = {"shifts labels", "sums itself", "prompt of its own"}


def aligned(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    shifted = functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    return batch | {"shift_labels": shifted, "num_items_in_batch": (shifted != -100).sum()}


def inputs(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """What of a batch a module takes."""
    names = list(type(model).forward.__code__.co_varnames[: type(model).forward.__code__.co_argcount])
    takes_all = type(model) in (LastToken, Penalized)
    return {key: x for key, x in batch.items() if takes_all or key in names}


def alone(case: str) -> tuple[list[float], list[Tensor]]:
    kind, labels, loss_of, _ = CASES[case]
    model, batch = kind(labels), aligned(build_batch(SIZE))
    losses = train_by_sgd(
        model.parameters(), lambda _: loss_of(model(**inputs(model, batch)), batch, None), STEPS
    )
    return losses, [p.detach() for p in model.parameters()]


def on_a_ring(
    rank: int, world_size: int, case: str, stage: int, section: dict[str, Any], change: str = ""
) -> Any:
    deepspeed = start_deepspeed()
    kind, labels, loss_of, _ = CASES[case]
    model = kind(labels)
    changes: dict[str, Any] = {"gradient_allreduce_op": "sum"} if change == "sum" else {}
    engine = start_engine(
        model, json_config(world_size, SIZE.samples, stage, ring_attention=section, **changes)
    )
    if kind is Gathers:
        model.ring = engine.ring
    if change == "compiled":
        engine.compile(backend="eager")
    losses = []
    with listen() as lines:
        for _ in range(STEPS):
            batch = engine.ring.shard_batch(build_batch(SIZE))
            loss = loss_of(engine(**inputs(model, batch)), batch, engine.ring)
            engine.backward(loss)
            engine.step()
            losses.append(float(engine.ring.mean_loss(loss)))
        engine.eval()
        with torch.no_grad():
            output = engine(**inputs(model, batch))
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        weights = [p.detach().clone() for p in model.parameters()]
    shapes = [
        list(x.shape)
        for x in (output.values() if isinstance(output, dict) else [output])
        if hasattr(x, "shape")
    ]
    return (
        losses,
        weights,
        [line for line in lines if "reads across" in line or "is not known" in line],
        shapes,
    )


@pytest.mark.day(
    "last token-0-2",
    "mean by a mask-0-2",
    "contrastive-0-2",
    "penalty beside a loss-0-2",
    "gathers itself-0-2",
)
@pytest.mark.situation(
    "wrappers", "a module around the model mixes tokens (reward models, embedders, pooling)"
)
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("case", [case for case in CASES if case not in NOT_EXACT])
def test_a_wrapper_trains_as_on_one_process(rank_pool: Any, case: str, stage: int, ranks: int) -> None:
    losses, weights = alone(case)
    runs = rank_pool(ranks).run(on_a_ring, case, stage, {})
    for rank, (mine, others, said, shapes) in enumerate(runs):
        assert mine == pytest.approx(losses, rel=1e-5)
        for a, b in zip(others, weights, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
        assert bool(said) == (CASES[case][3] and rank == 0), said
        # what stays on the rank is cut
        by_token = [shape for shape in shapes if len(shape) == 3]
        assert all(shape[1] < SIZE.tokens for shape in by_token), shapes


@pytest.mark.situation("wrappers", "a module around the model mixes tokens in a way that cannot be sharded")
@pytest.mark.parametrize(
    ("case", "section", "change", "error", "words"),
    [
        ("last token", {}, "compiled", "RingConfigError", "do not compile it, or let the module return"),
        ("last token", {}, "sum", "RingConfigError", '"gradient_allreduce_op": "sum" would count'),
        ("last token", {"min_sequence_length": 64}, "", "RingConfigError", '"min_sequence_length": 0'),
        ("prompt of its own", {}, "", "RingShapeError", "expected the batch's"),
        ("shifts labels", {}, "", "RingShapeError", "shift_labels to be used as they are"),
    ],
)
def test_what_cannot_be_made_exact_is_refused_on_every_rank(
    rank_pool: Any, case: str, section: dict[str, Any], change: str, error: str, words: str
) -> None:
    for outcome in rank_pool(2).collect(on_a_ring, case, 0, section, change, grace_s=30):
        assert outcome.error_type == error, outcome.report
        assert words in outcome.message
        assert "test_wrappers.py:" in outcome.message or case == "prompt of its own"


@pytest.mark.situation("wrappers", "a module around the model has collectives of its own")
def test_a_module_that_sends_by_itself_is_left_alone_with_a_warning(rank_pool: Any) -> None:
    (_, _, said, _), *_ = rank_pool(2).run(on_a_ring, "sums itself", 3, {})
    assert len(said) == 2 and "calls torch.distributed itself" in said[0]  # in training, in evaluation


@pytest.mark.parametrize("case", ["last real token", "mean by a mask", "penalty beside a loss", "centred"])
@pytest.mark.day("last real token", "penalty beside a loss", "centred")
def test_what_runs_on_whole_sequences_is_verified(rank_pool: Any, case: str) -> None:
    rank_pool(2).run(on_a_ring, case, 0, {"verify_first_batch": True})
