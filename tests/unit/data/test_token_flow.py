"""What mixes tokens is found by its operator; what does not passes, and keeps its tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from ds_ring.data.token_flow import TokenFlow

B, S, H = 2, 6, 6  # as wide as long: shapes tell nothing
Run = Callable[[Tensor, Tensor], Any]

MIXES: dict[str, Run] = {
    "a token": lambda h, ids: h[:, -1],
    "tokens by an index": lambda h, ids: h[torch.arange(B), torch.tensor([1, 3])],
    "some tokens": lambda h, ids: h[:, 1:],
    "mean": lambda h, ids: h.mean(1),
    "maximum": lambda h, ids: h.max(1).values,
    "softmax": lambda h, ids: h.softmax(1),
    "all entries in a circle": lambda h, ids: h.roll(1),
    "running sum": lambda h, ids: h.cumsum(1),
    "mean of all": lambda h, ids: h.mean(),
    "scores of all pairs": lambda h, ids: h @ h.transpose(1, 2),
    "tokens summed by a product": lambda h, ids: h.transpose(1, 2) @ torch.ones(B, S, 3),
    "added to a product": lambda h, ids: torch.addmm(h[0], torch.ones(S, H), torch.ones(H, H)),
    "tokens in a row": lambda h, ids: h.flatten(1),
    "norm over tokens": lambda h, ids: functional.layer_norm(h, (S, H)),
    "joined along tokens": lambda h, ids: torch.cat([h, h], dim=1),
    "joined with others": lambda h, ids: torch.cat([h, torch.ones(B, S, H)], dim=2),
    "weights by place": lambda h, ids: h * torch.arange(S)[:, None],
    "tokens against tokens": lambda h, ids: h * ids[:, None],
    "tokens of another place": lambda h, ids: h.gather(1, ids[..., None].expand(-1, -1, H)),
    "taken from others": lambda h, ids: torch.ones(B, S).gather(1, ids),
    "rows of a table of tokens": lambda h, ids: functional.embedding(torch.zeros(2).long(), h[0]),
    "a loss of local tokens": lambda h, ids: functional.mse_loss(h, h * 2),
    "read by Python": lambda h, ids: torch.equal(h, h),
    "written to a buffer": lambda h, ids: torch.zeros(B, S, H).copy_(h),
    "sums that are divided": lambda h, ids: h.sum(1) / ids.sum(1)[:, None],
    "sums that are no loss": lambda h, ids: h.sum(1),
    "a loss that nobody divides": lambda h, ids: h.sum(),
    "convolution": lambda h, ids: functional.conv1d(h.transpose(1, 2), torch.ones(3, H, 3)),
    "made of nothing known": lambda h, ids: torch.ones(B, S),
}
PASSES: dict[str, Run] = {
    "head": lambda h, ids: nn.Linear(H, 3)(h),
    "norm": lambda h, ids: nn.LayerNorm(H)(functional.rms_norm(h, (H,))),
    "heads": lambda h, ids: h.view(B, S, 2, 3).transpose(1, 2).softmax(-1).permute(0, 2, 1, 3).flatten(2),
    "merged with samples": lambda h, ids: (h.flatten(0, 1) * 2).unflatten(0, (B, S)),
    "attention over features": lambda h, ids: torch.einsum("bsh,bh->bs", h, torch.ones(B, H)),
    "pairs of samples": lambda h, ids: h[0] - h[1:].squeeze(0),
    "embedded": lambda h, ids: nn.Embedding(9, H)(ids) + ids[..., None],
    "joined": lambda h, ids: torch.stack([torch.cat([h, h.clone()], dim=-1), torch.cat([h, h], -1)], 0),
    "split": lambda h, ids: h.chunk(2, -1)[0] * h.unbind(-1)[0][..., None],
    "masked": lambda h, ids: h.masked_fill(ids[..., None] == 0, 0.0).where(h > 0, torch.zeros(())),
    "repeated": lambda h, ids: h.unsqueeze(2).expand(-1, -1, 2, -1).repeat(1, 1, 1, 2),
    "the best features": lambda h, ids: h.topk(2, -1).values + h.amax(-1, keepdim=True),
    "gathered features": lambda h, ids: h.log_softmax(-1).gather(-1, ids[..., None]).squeeze(-1),
    "all tokens": lambda h, ids: h[:, :, 0] * h[:, :S, 1],
    "in place": lambda h, ids: h.clone().add_(1).mul_(ids[..., None]),
    "dropout": lambda h, ids: functional.dropout(h, 0.5),
    "loss by token": lambda h, ids: functional.cross_entropy(
        h.flatten(0, 1), ids.flatten(), reduction="none"
    ),
}
DIVIDED: dict[str, Run] = {
    "loss of tokens": lambda h, ids: functional.cross_entropy(
        h.flatten(0, 1), ids.flatten(), reduction="sum"
    ) / 7,
    "of those that a mask picks": lambda h, ids: -h[ids > 0].log_softmax(-1)[:, 0].sum() / 7,
    "of none": lambda h, ids: h[ids > 99].sum() / 7,
    "sums that are added up": lambda h, ids: sum([h.sum()], torch.zeros(())) / 7 + sum([h.sum()]),
    "a copy of a sum": lambda h, ids: h.sum().clone(),
    "added to a zero": lambda h, ids: torch.zeros(()).add_(h.sum()),
}  # fmt: skip


def watch(run: Run, divided: bool = False, tokens: int = S) -> TokenFlow:
    torch.manual_seed(0)
    h, ids, flow = torch.randn(B, tokens, H), torch.arange(B * tokens).view(B, tokens) % H, TokenFlow(tokens)
    flow.add_tokens([h, ids], labels=ids)
    found: Any = []
    with torch.no_grad(), flow:
        found = run(h, ids)
    flow.check_results([found] if isinstance(found, Tensor) else [], divided)
    return flow


@pytest.mark.parametrize("case", MIXES)
def test_what_mixes_tokens_is_found(case: str) -> None:
    assert watch(MIXES[case]).fault


@pytest.mark.parametrize("case", PASSES)
@pytest.mark.parametrize("inference", [False, True])
def test_what_keeps_tokens_apart_passes(case: str, inference: bool) -> None:
    with torch.inference_mode(inference):
        assert watch(PASSES[case]).fault is None


@pytest.mark.parametrize("case", DIVIDED)
def test_a_sum_is_a_loss_if_it_is_divided_by_all_labels(case: str) -> None:
    assert watch(DIVIDED[case], divided=True).fault is None
    assert watch(DIVIDED[case]).fault == "a sum over tokens at its end"


def test_a_constant_beside_a_sum_would_count_on_every_rank() -> None:
    assert str(watch(lambda h, ids: h.sum() + 1, divided=True).fault).startswith("add over tokens")
    assert str(watch(lambda h, ids: h.sum() + torch.ones(()), divided=True).fault).startswith(
        "add over tokens"
    )


def test_one_token_is_a_token_too() -> None:
    assert watch(lambda h, ids: h.squeeze(1), tokens=1).fault


def test_labels_that_are_shifted_again_are_told() -> None:
    assert watch(lambda h, ids: (h[:, :-1], ids[:, 1:])).shifts
    assert watch(lambda h, ids: ids[:, 1:]).shifts
    assert not watch(lambda h, ids: (h[:, :-1], ids[:, :])).shifts


def test_results_of_an_inner_model_pass_and_what_it_gets_is_looked_at() -> None:
    flow, loss, pooled = TokenFlow(S), torch.ones(()), torch.ones(B, 3)
    with flow:
        flow.pause()
        hidden = torch.ones(B, S, H)
        flow.resume()
        flow.add_results([hidden, loss, pooled], [pooled])
        results = [hidden * 2, loss * 0.5, pooled.softmax(1)]
    flow.check_results(results, False)
    assert not flow.fault
    flow.check_inputs([torch.arange(S)[None]])
    assert "made for this rank's tokens" in str(flow.fault)


def test_an_error_of_the_model_is_its_own_and_what_it_took_is_told() -> None:
    flow, h = TokenFlow(S), torch.ones(B, S, H)
    flow.add_tokens([h], labels=None)
    with pytest.raises(IndexError), flow:
        h[:, torch.tensor([S])]
    assert str(flow.fault).startswith("index over tokens at ")
