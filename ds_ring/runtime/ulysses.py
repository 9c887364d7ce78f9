"""Ulysses: trade tokens for heads by all-to-all, around the ring (Jacobs et al. 2023, DeepSpeed Ulysses).

Owns the differentiable all-to-all as the operator `ds_ring::swap_heads_tokens`. The U ranks of a Ulysses
group hold consecutive parts of one ring shard; before the pass each gets the whole shard of H / U heads,
after it everything goes back.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ds_ring.errors import RingShapeError
from ds_ring.runtime.context import context_of
from ds_ring.runtime.exchange import Exchange

HEADS, TOKENS = 1, 2


@torch.library.custom_op("ds_ring::swap_heads_tokens", mutates_args=())
def swap_op(x: Tensor, split_dim: int, join_dim: int, handle: int) -> Tensor:
    """Split `split_dim` over the Ulysses ranks and join their parts along `join_dim`; [B, H, S, D]."""
    mesh = context_of(handle).mesh
    if x.shape[split_dim] % mesh.ulysses_size:
        raise RingShapeError(
            f"Ulysses splits heads: {x.shape[split_dim]} heads are not divisible by ulysses_size"
            f" {mesh.ulysses_size}; use a divisor of the number of K/V heads, and a larger ring"
        )
    parts = x.chunk(mesh.ulysses_size, dim=split_dim)
    exchange = context_of(handle).exchange or Exchange(mesh)
    return torch.cat(exchange.all_to_all(parts, mesh.ulysses_group), dim=join_dim)


@swap_op.register_fake
def _(x: Tensor, split_dim: int, join_dim: int, handle: int) -> Tensor:
    size = context_of(handle).mesh.ulysses_size
    shape = list(x.shape)
    shape[split_dim] //= size
    shape[join_dim] *= size
    return x.new_empty(shape)


def _setup(ctx: Any, inputs: tuple[Tensor, int, int, int], output: Tensor) -> None:
    ctx.dims = inputs[1:]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    split_dim, join_dim, handle = ctx.dims
    return swap_op(grad, join_dim, split_dim, handle), None, None, None


swap_op.register_autograd(_backward, setup_context=_setup)


def tokens_to_heads(x_BHSD: Tensor, handle: int) -> Tensor:
    """[B, H, S / U, D] of all heads -> [B, H / U, S, D] of this rank's heads."""
    return swap_op(x_BHSD, HEADS, TOKENS, handle)


def heads_to_tokens(x_BHSD: Tensor, handle: int) -> Tensor:
    """[B, H / U, S, D] of this rank's heads -> [B, H, S / U, D] of all heads."""
    return swap_op(x_BHSD, TOKENS, HEADS, handle)
