"""The load balancing loss of all ranks' tokens, and its gradients, against transformers' of the whole."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.models.mixtral import modeling_mixtral

from ds_ring.errors import RingConfigError
from ds_ring.models.families import LossGuard, RouterLoss, read_router_loss, router_loss
from tests.sessions import session_of

EXPERTS, CHOSEN, RANKS, SAMPLES, TOKENS = 5, 2, 3, 2, 12


@pytest.mark.parametrize("padded", [False, True])
def test_shards_together_have_the_loss_of_the_whole(padded: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    layers = [
        (3 * torch.randn(SAMPLES, TOKENS, EXPERTS, generator=generator)).requires_grad_() for _ in range(2)
    ]
    mask_BT = (torch.arange(TOKENS) < torch.tensor([[12], [5]])).long() if padded else None
    theirs = modeling_mixtral.load_balancing_loss_func(
        tuple(x.flatten(0, 1) for x in layers), EXPERTS, CHOSEN, mask_BT
    )
    ours, sums = RouterLoss(EXPERTS, CHOSEN, 0.1), list[Tensor]()

    def of_rank(rank: int, add_up: Any) -> Tensor:
        here = slice(rank * TOKENS // RANKS, (rank + 1) * TOKENS // RANKS)
        logits = [x[:, here].flatten(0, 1) for x in layers]
        return ours(logits, None if mask_BT is None else mask_BT[:, here], add_up)

    for rank in range(RANKS):
        of_rank(rank, lambda x: sums.append(x) or x)
    total = torch.stack(sums).sum(dim=0)
    for rank in range(RANKS):
        got = of_rank(rank, lambda x: total)
        torch.testing.assert_close(got, theirs)
    for found, right in zip(
        torch.autograd.grad(got, layers), torch.autograd.grad(theirs, layers), strict=True
    ):
        torch.testing.assert_close(found, right)


SIZES = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 32, "num_local_experts": EXPERTS, "num_experts_per_tok": CHOSEN,
    "router_aux_loss_coef": 0.37,
}  # fmt: skip


def test_experts_and_weight_are_read_off_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**SIZES))
    assert read_router_loss(model) == RouterLoss(EXPERTS, CHOSEN, 0.37)
    assert read_router_loss(torch.nn.Linear(1, 1)) is None
    with pytest.MonkeyPatch.context() as patch:
        for faulty in ({"num_experts": "five"}, {"router_aux_loss_coef": None}):
            for name, value in faulty.items():
                patch.setattr(model, name, value)
            with pytest.raises(RingConfigError, match="expected transformers' router loss, got another"):
                read_router_loss(model)
    session = session_of()
    model.num_experts, guard = None, LossGuard(len)
    hook: Any = router_loss(model, guard, session)
    output = SimpleNamespace(aux_loss=torch.zeros(()), router_logits=(torch.ones(1),), loss=None)
    with pytest.raises(RingConfigError, match="expected transformers' router loss, got another"):
        hook(model, (), {}, output)
    model.num_experts = EXPERTS
    right = modeling_mixtral.load_balancing_loss_func
    for wrong in (lambda *given: 2 * right(*given), lambda logits, e, k, mask: right(logits, e, k, None)):
        monkeypatch.setattr(modeling_mixtral, "load_balancing_loss_func", wrong)
        with pytest.raises(RingConfigError, match="expected transformers' router loss"):
            read_router_loss(model)


def test_a_model_that_adds_the_local_term_in_place_has_that_of_all_tokens_once() -> None:
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**SIZES)).eval()
    batch, session = {"input_ids": torch.randint(32, (2, 12))}, session_of()
    batch["labels"] = batch["input_ids"]
    before = model(**batch, output_router_logits=True)
    guard = model.loss_function = LossGuard(model.loss_function)
    replace = router_loss(model, guard, session)
    on_ring = model(**session.shard_batch(batch), output_router_logits=True)
    replace(model, (), {}, on_ring)
    assert before.aux_loss > 0.1
    torch.testing.assert_close(on_ring.aux_loss, before.aux_loss)
    torch.testing.assert_close(on_ring.loss, before.loss)
