"""NaN in padding slots, of inputs and of gradients, reaches no gradient: of no input, parameter or sink."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ds_ring import (
    Causal,
    Full,
    RingMesh,
    cross_attention,
    latent_attention,
    make_layout,
    moba_attention,
    ring_attention,
    ring_select,
    selected_attention,
)
from ds_ring.schedule.pieces import round_to_blocks
from tests.dist.harness import Pool

Results = tuple[Tensor, ...]
TOKENS, HEADS, GROUPS, DIM = 45, 4, 2, 8  # 3 slots of padding on two ranks of whole blocks of 4


def attention(x: dict[str, Tensor], place: dict[str, Any]) -> Results:
    return ring_attention(
        x["q"], x["k"], x["v"], pattern=Causal(), sinks=x["sinks"], return_lse=True, **place
    )


def latents(x: dict[str, Tensor], place: dict[str, Any]) -> Results:
    return latent_attention(
        x["q"], x["k"][:, :1], x["v"][:, :1, :, :4], x["up"], pattern=Causal(), sinks=x["sinks"],
        return_lse=True, **place,
    )  # fmt: skip


def selected(x: dict[str, Tensor], place: dict[str, Any]) -> Results:
    def scores(rows: slice, keys: Tensor) -> Tensor:
        return x["q"][:, 0, rows] @ keys.mT

    chosen = ring_select(scores, 5, x["k"].detach()[:, 0], **place)
    return selected_attention(x["q"], x["k"], x["v"], chosen, sinks=x["sinks"], return_lse=True, **place)


def crossed(x: dict[str, Tensor], place: dict[str, Any]) -> Results:
    return cross_attention(
        x["q"], x["k"], x["v"], pattern=Full(), key_layout=place["layout"], sinks=x["sinks"],
        return_lse=True, **place,
    )  # fmt: skip


def moba(x: dict[str, Tensor], place: dict[str, Any]) -> Results:
    return (moba_attention(x["q"], x["k"], x["v"], block_size=4, top_k=2, **place),)


CALLS = {item.__name__: item for item in (attention, latents, selected, crossed, moba)}


def gradients(rank: int, world_size: int) -> dict[str, float]:
    """The largest difference of any gradient, by call, between NaN and 0 in padding; NaN for NaN."""
    mesh = RingMesh.from_world(world_size)
    layout = round_to_blocks(make_layout("contiguous", tokens=TOKENS, ring_size=world_size), 4)
    slots, tokens, result = layout.local_tokens, layout.valid_tokens(rank), {}
    shapes = {
        "q": (1, HEADS, slots, DIM), "k": (1, GROUPS, slots, DIM), "v": (1, GROUPS, slots, DIM),
        "sinks": (HEADS,), "up": (HEADS * (4 + DIM), DIM),
    }  # fmt: skip
    for name, call in CALLS.items():
        grads: list[dict[str, Tensor]] = []
        for fill in (0.0, torch.nan):
            torch.manual_seed(rank)
            x = {key: torch.randn(shape, dtype=torch.float64) for key, shape in shapes.items()}
            for key in ("q", "k", "v"):
                x[key][:, :, tokens:] = fill
            x = {key: item.requires_grad_() for key, item in x.items()}
            results = call(x, {"layout": layout, "mesh": mesh})
            of_results = [torch.randn(item.shape, dtype=torch.float64) for item in results]
            for item in of_results:
                item[:, :, tokens:] = fill
            torch.autograd.backward(results, of_results)
            grads.append({key: item.grad for key, item in x.items() if item.grad is not None})
        zeros, nans = grads
        for key, item in zeros.items():
            rows = slice(None) if key in ("sinks", "up") else (slice(None), slice(None), slice(0, tokens))
            result[f"{name} {key}"] = float((nans[key][rows] - item[rows]).abs().max())
    return result


@pytest.mark.situation(
    "padding", "NaN in padding slots of inputs and of gradients, in every kind of attention"
)
def test_nan_of_padding_reaches_no_gradient(rank_pool: Pool) -> None:
    for result in rank_pool(2).run(gradients):
        assert len(result) == 20  # inputs that get a gradient, of all calls
        assert all(error < 1e-12 for error in result.values()), result
