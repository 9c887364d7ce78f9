"""The gradient of the log-sum-exp alone, where no output is used: each function runs its backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_ring import Causal, RingMesh, SlidingWindow, make_layout
from ds_ring.layers.distance_bias.attention import DistanceBiasAttention
from ds_ring.layers.selection.attention import selected_attention
from tests import calls

T, H, G, D, N = 8, 4, 2, 6, 3
LAYOUT = make_layout("contiguous", tokens=T, ring_size=1)
PLACE: dict[str, Any] = {"layout": LAYOUT, "mesh": RingMesh.single()}
SEEN = torch.ones(T, T).tril().bool()


def random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def causal(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    lse: Tensor = calls.attend(q, k, v, pattern=Causal(), return_lse=True, **PLACE, **options)[1]
    return lse


def chosen(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    numbers = torch.arange(T).where(SEEN, -1)[None]
    lse: Tensor = selected_attention(q, k, v, numbers, return_lse=True, **PLACE)[1]
    return lse


def biased(q: Tensor, k: Tensor, v: Tensor, profiles: Tensor) -> Tensor:
    attend = DistanceBiasAttention(SlidingWindow(T), scale=D**-0.5, **PLACE)
    lse: Tensor = attend(q, k, v, profiles=profiles, return_lse=True)[1]
    return lse


def dense(q: Tensor, k: Tensor, *_: Tensor) -> Tensor:
    scores = q[..., :D] @ k.repeat_interleave(H // G, dim=1).mT * D**-0.5
    return scores.masked_fill(~SEEN, -torch.inf).logsumexp(-1)


def dense_biased(q: Tensor, k: Tensor, _: Tensor, profiles: Tensor) -> Tensor:
    distances = (torch.arange(T)[:, None] - torch.arange(T)).clamp(min=0)
    bias = (q[..., D:] @ profiles)[..., torch.arange(T)[:, None], distances]
    scores = q[..., :D] @ k.repeat_interleave(H // G, dim=1).mT * D**-0.5 + bias
    return scores.masked_fill(~SEEN, -torch.inf).logsumexp(-1)


def dense_latents(q: Tensor, latent: Tensor, rope: Tensor, up: Tensor) -> Tensor:
    keys = latent @ up.unflatten(0, (H, -1))[:, : D - N].mT  # and N numbers with rotary embedding
    scores = q @ torch.cat([keys, rope.expand(-1, H, -1, -1)], dim=-1).mT * D**-0.5
    return scores.masked_fill(~SEEN, -torch.inf).logsumexp(-1)


KEYS = [(1, G, T, D), (1, G, T, D)]
CASES: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "ring": (causal, dense, [(1, H, T, D), *KEYS]),
    "replicated queries": (lambda *x: causal(*x, queries="replicated"), dense, [(1, H, T, D), *KEYS]),
    "chosen keys": (chosen, dense, [(1, H, T, D), *KEYS]),
    "latents": (
        lambda *x: causal(*x[:3], up_projection=x[3]), dense_latents,
        [(1, H, T, D), (1, 1, T, 5), (1, 1, T, N), (H * (D - N + 4), 5)],
    ),
    "distances": (biased, dense_biased, [(1, H, T, D + N), *KEYS, (N, T)]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_gradient_of_the_lse_alone_is_that_of_dense_attention(name: str) -> None:
    torch.manual_seed(0)
    attend, reference, shapes = CASES[name]
    operands = [random(*shape).requires_grad_() for shape in shapes]
    weights, results = random(1, H, T), []
    for compute in (attend, reference):
        lse = compute(*operands)
        grads = torch.autograd.grad((lse * weights).sum(), operands, materialize_grads=True)
        results.append((lse, *grads))
    for ours, wanted in zip(*results, strict=True):
        torch.testing.assert_close(ours, wanted)
