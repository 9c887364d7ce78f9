"""Verdicts on a first step, on one rank: what differs, what raised, what is looked at again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ds_ring.comm.mesh import RingMesh
from ds_ring.engines.first_batch.first_batch import (
    FirstBatch,
    Forward,
    LossFit,
    compare_loss,
    read_loss_fit,
    read_outputs,
)
from ds_ring.errors import RingConfigError, RingVerifyError
from ds_ring.memory.tiles.deferred_logits import DeferredLogits
from tests.one_rank import one_rank_mesh
from tests.refusals import Refusals, refuse
from tests.sessions import session_of

IDS = torch.arange(1, 9)[None]


class Small(nn.Module):
    def __init__(self, rate: float = 0.0) -> None:
        super().__init__()
        self.embed, self.head, self.drop = nn.Embedding(9, 4), nn.Linear(4, 9), nn.Dropout(rate)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.embed(input_ids))


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RingMesh]:
    with one_rank_mesh("gloo", tmp_path_factory.mktemp("store")) as mesh:
        yield mesh


def double_a_gradient(first: FirstBatch) -> None:
    for parameter in first.engine.module.parameters():
        parameter.grad *= 2


def break_the_copy(first: FirstBatch) -> None:
    first._alone.forward = None  # type: ignore[assignment]


def step(spoil: Callable[[FirstBatch], None], factor: float = 1.0, half: bool = False) -> Any:
    """A step of a loop that computes its loss: of the rank's labels by the mean over all, times a factor."""
    session, model = session_of(), Small()
    first = FirstBatch(model, session)
    first.engine = SimpleNamespace(
        module=model, is_gradient_accumulation_boundary=lambda: True, fp16_enabled=lambda: False,
        gradient_accumulation_steps=lambda: 1,
    )  # fmt: skip
    batch = session.shard_batch({"input_ids": IDS, "labels": IDS})
    logits = first.around_forward(model, input_ids=batch["input_ids"])
    (session.loss(logits, batch).backward_loss * factor).backward()
    if half:
        model.half()
        next(model.parameters()).grad.fill_(torch.inf)
    spoil(first)
    return first, first.around_step(lambda: "stepped")


def nothing(first: FirstBatch) -> None:
    """The ring is right."""


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (double_a_gradient, "to equal one process, got: .*embed.weight.*; look at the first name: a model"),
        (break_the_copy, "got: the model on one process raised TypeError: .*not callable"),
    ],
)
def test_a_step_that_differs_is_refused(mesh: RingMesh, spoil: Any, words: str) -> None:
    with pytest.raises(RingVerifyError, match=words):
        step(spoil)


def test_a_step_that_is_right_is_looked_at_once(mesh: RingMesh, caplog: pytest.LogCaptureFixture) -> None:
    first, result = step(nothing)
    assert result == "stepped" and first._done and not caplog.messages
    step(nothing, factor=2.0)
    assert "its gradient is 2 times as large" in caplog.text


def test_a_step_without_a_loss_or_with_an_overflow_waits_for_the_next(mesh: RingMesh) -> None:
    first, result = step(nothing, half=True)
    assert result == "stepped" and not first._done
    assert first.around_step(lambda: "again") == "again" and not first._done  # no forward pass since


FIT = LossFit(4, 1.0, (9.0, 0.0))
LOSSES: dict[str, tuple[list[LossFit], str]] = {
    "right": ([FIT, FIT], ""),
    "another direction": ([FIT, LossFit(4, 1.0, (9.0, 0.72))], "its gradient differs by 2.0e-01"),
    "no label at all": ([LossFit(0, None, (0.0, 0.0))], ""),
    "means of ranks": (
        [FIT, LossFit(2, 2.0, (9.0, 0.0))], "ranks weight a token by 1 to 2, each by labels of its own",
    ),
    "a sum": ([FIT, FIT, FIT], "its gradient is 1.5 times as large"),
}  # fmt: skip


@pytest.mark.parametrize("case", LOSSES)
def test_how_a_loss_of_the_loop_differs(case: str) -> None:
    fits, words = LOSSES[case]
    assert compare_loss(fits, 8.0, 1.0, torch.float32) == words
    assert compare_loss(fits, 8.0, None, torch.float32) == ("" if case == "a sum" else words)


def test_a_loss_that_is_no_softmax_is_not_compared() -> None:
    logits, labels = torch.randn(1, 8, 9, requires_grad=True), IDS
    for loss, fits in ((cross_entropy(logits[0], labels[0]), True), (logits.square().sum(), False)):
        (gradient,) = torch.autograd.grad(loss, logits)
        forward = Forward((), {}, (8, None, ()), logits, None, {}, sharding=None, labels=labels)  # type: ignore[arg-type]
        forward.gradients["logits"] = gradient
        fit = read_loss_fit(forward)
        assert (fit is not None) == fits and (fit is None or fit.factor == pytest.approx(1 / 8))


def test_logits_that_were_put_off_are_computed() -> None:
    head, hidden = nn.Linear(4, 9), torch.randn(1, 3, 4)
    output = SimpleNamespace(loss=torch.zeros(()), logits=DeferredLogits(hidden, lambda x, _: head(x), 2, 9))
    logits, loss = read_outputs(output)
    assert torch.equal(logits, head(hidden)) and loss is output.loss


def with_attribute() -> nn.Module:
    model = Small()
    model.attention_dropout = 0.25  # type: ignore[assignment]
    return model


REFUSED: Refusals = {
    "a module that drops": (lambda: FirstBatch(Small(0.5), session_of()), RingConfigError,
        "verify_first_batch: expected no dropout, got drop.p = 0.5; set it to 0"),
    "attention that drops": (lambda: FirstBatch(with_attribute(), session_of()), RingConfigError,
        "got .attention_dropout = 0.25"),
    "no optimizer": (lambda: FirstBatch(Small(), session_of(), trains=False), RingConfigError,
        "expected an optimizer, got none; set it to false"),
}  # fmt: skip
test_it_is_refused = refuse(REFUSED)
