"""Trade tokens for heads by all-to-all, around the ring (Jacobs et al. 2023, DeepSpeed Ulysses).

Owns the differentiable all-to-all as the operator `ds_ring::swap_heads_tokens`. The U ranks of a Ulysses
group hold consecutive parts of one ring shard. Before the pass each gets the whole shard of H / U heads;
after the pass the results go back. Like every operator that sends, this one first compares headers with all
ranks of the sequence. q, k and v are checked here, before they are split.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ds_ring.comm.collective import collective
from ds_ring.compat.torch import operator
from ds_ring.ops.bits import pack, unpack, view_as_bits, view_from_bits
from ds_ring.ops.context import RingContext, get_ring_context
from ds_ring.ops.eager import run_compared
from ds_ring.ops.layer_gradients import has_run_again, note_call
from ds_ring.ops.passes import Operands, run_gradient
from ds_ring.ops.prepare import check

HEADS, TOKENS = 1, 2


class UlyssesAllToAll(NamedTuple):
    """One all-to-all of a training step.

    Attention has four: of q, k, v; of out; and of the gradients of each.

    Attributes:
        split_dim, join_dim: the dimensions that it splits and joins.
        gradient: the name of the all-to-all that computes its gradient.
        check: a function of context, tensors and number of parts; raises RingError for tensors that do not
            fit. None for results and gradients.
    """

    split_dim: int
    join_dim: int
    gradient: str
    check: Callable[[RingContext, Sequence[Tensor], int], object] | None = None


def _check(context: RingContext, tensors: Sequence[Tensor], parts: int) -> None:
    q, k, v = tensors
    check(context, Operands(q, k, v), parts)


# There are two operations, with a name for each use. Ranks compare the name, so two ranks cannot exchange
# data of different uses. A layer with operands of its own adds a row.
SWAPS = {
    "Ulysses of q, k, v": UlyssesAllToAll(HEADS, TOKENS, "Ulysses of dq, dk, dv", _check),
    "Ulysses of out": UlyssesAllToAll(TOKENS, HEADS, "Ulysses of the gradient of out"),
    "Ulysses of the gradient of out": UlyssesAllToAll(HEADS, TOKENS, "Ulysses of out"),
    "Ulysses of dq, dk, dv": UlyssesAllToAll(TOKENS, HEADS, "Ulysses of q, k, v"),
}


@operator("ds_ring::swap_heads_tokens")
def swap_op(tensors: Sequence[Tensor], name: str, handle: int) -> list[Tensor]:
    """Run the all-to-all of that name on all tensors, each [B, H, S, D], in one exchange."""
    context = get_ring_context(handle)
    mesh, swap = context.mesh, SWAPS[name]
    is_fake = isinstance(tensors[0], FakeTensor)
    with collective(mesh, name, context.exchange, is_fake) as call:
        if swap.check is not None:
            swap.check(context, tensors, mesh.ulysses_size)
        # An all-to-all of other sizes on one rank ends its process: compare every tensor, not q and v alone.
        shapes = {f"tensor {i} of Ulysses": f"{tuple(x.shape)} {x.dtype}" for i, x in enumerate(tensors)}
        parts = [view_as_bits(x).chunk(mesh.ulysses_size, dim=swap.split_dim) for x in tensors]
        packets = [pack(tensors_of_rank) for tensors_of_rank in zip(*parts, strict=True)]
        context.agree(call, tensors[0], tensors[-1], shapes)
        received = call.exchange.all_to_all(packets, mesh.ulysses_group)
        from_ranks = [unpack(packet, [of_ranks[0] for of_ranks in parts]) for packet in received]
        whole = [torch.cat(of_ranks, dim=swap.join_dim) for of_ranks in zip(*from_ranks, strict=True)]
        return [view_from_bits(tensor, x.dtype) for tensor, x in zip(whole, tensors, strict=True)]


@swap_op.register_fake
def _(tensors: Sequence[Tensor], name: str, handle: int) -> list[Tensor]:
    size, swap = get_ring_context(handle).mesh.ulysses_size, SWAPS[name]
    shapes = [list(x.shape) for x in tensors]
    for shape in shapes:
        shape[swap.split_dim] //= size
        shape[swap.join_dim] *= size
    return [x.new_empty(shape) for x, shape in zip(tensors, shapes, strict=True)]


def swap(tensors: Sequence[Tensor], name: str, handle: int) -> list[Tensor]:
    """Run the all-to-all of that name.

    Outside of compiled code, ranks first compare whether a gradient is required: on all of them, or on none.
    """
    if torch.compiler.is_compiling():
        return swap_op(tensors, name, handle)
    return run_compared(get_ring_context(handle).mesh, name, swap_op, tensors, name, handle)


def _setup_swap(ctx: Any, inputs: tuple[Sequence[Tensor], str, int], output: list[Tensor]) -> None:
    tensors, ctx.name, ctx.handle = inputs
    note_call(ctx, get_ring_context(ctx.handle).exchange, tensors[0])


def _backward_swap(ctx: Any, grads: list[Tensor]) -> tuple[list[Tensor], None, None]:
    arguments = (grads, SWAPS[ctx.name].gradient, ctx.handle)
    return (
        run_gradient(get_ring_context(ctx.handle).mesh, has_run_again(ctx), swap_op, *arguments),
        None,
        None,
    )


swap_op.register_autograd(_backward_swap, setup_context=_setup_swap)


def with_ulysses(
    run: Callable[..., tuple[Tensor, Tensor]], q: Tensor, k: Tensor, v: Tensor, handle: int,
    ulysses_size: int, return_lse: bool, name: str = "Ulysses of q, k, v",
) -> Any:  # fmt: skip
    """Call `run` on q, k and v and return all heads; inside `run`, a Ulysses rank has some of the heads.

    `name` is that of the all-to-all before the pass.
    """
    if ulysses_size == 1:
        out, lse = run(q, k, v)
        return (out, lse) if return_lse else out
    out, lse = run(*swap([q, k, v], name, handle))
    if not return_lse:
        return swap([out], "Ulysses of out", handle)[0]
    out, lse = swap([out, lse.unsqueeze(-1)], "Ulysses of out", handle)
    return out, lse.squeeze(-1)
