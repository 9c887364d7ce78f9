"""Trade tokens for heads by all-to-all, around the ring (Jacobs et al. 2023, DeepSpeed Ulysses).

Owns the differentiable all-to-all as the operator `ds_ring::swap_heads_tokens`. The U ranks of a Ulysses
group hold consecutive parts of one ring shard; before the pass each gets the whole shard of H / U heads,
after it everything goes back. Like every operator that sends, it agrees with all ranks of the sequence
first; the checks of q, k and v are made here, before they are taken apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ds_ring.errors import RingError
from ds_ring.runtime.context import RingContext, context_of
from ds_ring.runtime.exchange import Exchange

HEADS, TOKENS = 1, 2


class Swap(NamedTuple):
    """Describe one of the four all-to-alls of a step; each takes all tensors of its place at once.

    Attributes:
        split_dim: the dimension that is split over the Ulysses ranks.
        join_dim: the dimension along which their parts are joined.
        gradient: name of the swap that is this one's gradient.
    """

    split_dim: int
    join_dim: int
    gradient: str


# Two operations under four names: ranks agree on the name, so swaps of two places in a step cannot meet.
_SWAPS = {
    "Ulysses of q, k, v": Swap(HEADS, TOKENS, "Ulysses of dq, dk, dv"),
    "Ulysses of out": Swap(TOKENS, HEADS, "Ulysses of the gradient of out"),
    "Ulysses of the gradient of out": Swap(HEADS, TOKENS, "Ulysses of out"),
    "Ulysses of dq, dk, dv": Swap(TOKENS, HEADS, "Ulysses of q, k, v"),
}


@torch.library.custom_op("ds_ring::swap_heads_tokens", mutates_args=(), tags=torch.Tag.cudagraph_unsafe)
def swap_op(tensors: Sequence[Tensor], name: str, handle: int) -> list[Tensor]:
    """Run the all-to-all of that name, for each of some [B, H, S, D]."""
    context = context_of(handle)
    with context.mesh.in_call():
        context.agree(name, tensors[0], tensors[-1], _refusal(context, name, tensors))
        swap, mesh = _SWAPS[name], context.mesh
        # A sequence of one rank has none; its all-to-all hands the parts back.
        exchange = context.exchange or Exchange(mesh)
        by_rank = zip(*(x.chunk(mesh.ulysses_size, dim=swap.split_dim) for x in tensors), strict=True)
        packets = [_pack(parts) for parts in by_rank]
        received = exchange.all_to_all(packets, mesh.ulysses_group)
        del packets
        shapes = [_part_shape(x, mesh.ulysses_size, swap) for x in tensors]
        from_ranks = zip(*(_unpack(one, tensors, shapes) for one in received), strict=True)
        return [torch.cat(parts, dim=swap.join_dim) for parts in from_ranks]


# [Note: packets]
# All tensors of a place go in one message to each rank: an all-to-all costs its latency once and not three
# times. They may differ in dtype, so a packet is bytes, and wider elements stand first: each is aligned.
def _order(tensors: Sequence[Tensor]) -> list[int]:
    return sorted(range(len(tensors)), key=lambda index: -tensors[index].element_size())


def _pack(parts: Sequence[Tensor]) -> Tensor:
    """Return the bytes of some tensors as one; [Note: packets]."""
    if len(parts) == 1:
        return parts[0].contiguous()
    return torch.cat([parts[index].contiguous().view(-1).view(torch.uint8) for index in _order(parts)])


def _part_shape(x: Tensor, size: int, swap: Swap) -> list[int]:
    shape = list(x.shape)
    shape[swap.split_dim] //= size
    return shape


def _unpack(packet: Tensor, like: Sequence[Tensor], shapes: Sequence[list[int]]) -> list[Tensor]:
    """Return views of the tensors in a packet, with the dtypes of `like`."""
    if len(like) == 1:
        return [packet]
    found: dict[int, Tensor] = {}
    offset = 0
    for index in _order(like):
        size = math.prod(shapes[index]) * like[index].element_size()
        part = packet[offset : offset + size].view(like[index].dtype)
        found[index] = part.view(shapes[index])
        offset += size
    return [found[index] for index in range(len(like))]


def _refusal(context: RingContext, name: str, tensors: Sequence[Tensor]) -> RingError | None:
    """Return why q, k and v cannot be taken apart; what comes after them was made by this package."""
    if name == "Ulysses of q, k, v":
        q, k, v = tensors
        try:
            context.check(q, k, v, parts=context.mesh.ulysses_size)
        except RingError as error:
            return error
    return None


@swap_op.register_fake
def _(tensors: Sequence[Tensor], name: str, handle: int) -> list[Tensor]:
    size, swap = context_of(handle).mesh.ulysses_size, _SWAPS[name]
    shapes = [list(x.shape) for x in tensors]
    for shape in shapes:
        shape[swap.split_dim] //= size
        shape[swap.join_dim] *= size
    return [x.new_empty(shape) for x, shape in zip(tensors, shapes, strict=True)]


def _setup(ctx: Any, inputs: tuple[Sequence[Tensor], str, int], output: list[Tensor]) -> None:
    ctx.name, ctx.handle = inputs[1:]


def _backward(ctx: Any, grads: list[Tensor]) -> tuple[list[Tensor], None, None]:
    return swap_op(grads, _SWAPS[ctx.name].gradient, ctx.handle), None, None


swap_op.register_autograd(_backward, setup_context=_setup)


def tokens_to_heads(q: Tensor, k: Tensor, v: Tensor, handle: int) -> list[Tensor]:
    """Turn [B, H, S / U, D] of all heads into [B, H / U, S, D] of this rank's heads, for each."""
    return swap_op([q, k, v], "Ulysses of q, k, v", handle)


def heads_to_tokens(results_BHSD: Sequence[Tensor], handle: int) -> list[Tensor]:
    """Turn [B, H / U, S, D] of this rank's heads into [B, H, S / U, D] of all heads, for each."""
    return swap_op(results_BHSD, "Ulysses of out", handle)


def gradients_to_heads(results_BHSD: Sequence[Tensor], handle: int) -> list[Tensor]:
    """Turn what a pass back takes, the gradient of out first, as `tokens_to_heads` does q, k and v."""
    return swap_op(results_BHSD, "Ulysses of the gradient of out", handle)


def gradients_to_tokens(gradients_BHSD: Sequence[Tensor], handle: int) -> list[Tensor]:
    """Turn dq, dk and dv as `heads_to_tokens` does results."""
    return swap_op(gradients_BHSD, "Ulysses of dq, dk, dv", handle)
