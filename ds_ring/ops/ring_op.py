"""Register the operators `ds_ring::ring_attention` and `ds_ring::replicated_attention`, and their gradients.

Owns the registration with torch.library and nothing else: for torch.compile the whole pass is one
opaque node, so a compiled graph has no break and does not grow with the number of ranks. Why opaque: a
ring traced as functional collectives silently loses O(T/P), since the partitioner saves every rotated
shard.
Saved for backward: local q, k, v, out, lse, or their copies on the host. Nothing else.

[Note: an opaque operator]
If torch.compile traced the collectives, the partitioner could save every rotated shard, and Inductor could
reorder the sends. Under the backend "ds_ring" one graph serves all batches of a length, so the layout is
data: the graph asks for the number of the batch's layout in each run ([Note: placements in compiled code]).

[Note: sinks and the log-sum-exp] The sink of a head is where its merge starts (out 0, lse = sink), so no
kernel knows of sinks: the backward pass is the same with the lse that includes the sink, and the sink's
gradient is a sum over the local queries. A gradient of the lse is subtracted from the row sums of out x
grad_out, in every kernel (aten's operator for the CPU gets it as a column).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor, peek_interpreter_stack
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.nn.functional import pad

from ds_ring.comm.exchange import Exchange
from ds_ring.comm.mesh import RingMesh, check_mesh
from ds_ring.decode.replicated import ReplicatedPass
from ds_ring.errors import RingConfigError, RingError, RingShapeError, shown
from ds_ring.layers.latents.kernel import LatentKernel
from ds_ring.masks.catalog import (
    Causal,
    Chunked,
    Dilated,
    DilatedWindow,
    Full,
    PrefixLM,
    Sinks,
    SlidingWindow,
)
from ds_ring.masks.mask_mod import Alibi, MaskMod, ScoreFunction, ScoreMod, Softcap
from ds_ring.masks.pattern import Intersection, Pattern, Union
from ds_ring.memory.saved_results import KeptRows, kept_or_run, saved_on_host
from ds_ring.ops.checks import why_not_an_operand, why_not_this_derivative
from ds_ring.ops.context import (
    RingContext,
    constant,
    constant_in_graphs,
    context_for,
    context_of,
    first_queries,
    is_constant,
    latent_value_dim,
    new_handle,
    number_of,
    object_of,
    operator,
    refuse,
    refusing_context,
)
from ds_ring.ops.options import Options
from ds_ring.ring.buffers import PreparedPasses
from ds_ring.ring.merge import accumulator_dtype
from ds_ring.ring.ring_pass import RingPass
from ds_ring.schedule.layout import Layout
from ds_ring.transports.all_gather import GatherPass
from ds_ring.transports.pull.signals import PullExchange
from ds_ring.transports.reproducible import ReproduciblePass

# Trade tokens for heads by all-to-all, around the ring (Jacobs et al. 2023, DeepSpeed Ulysses).
#
# Owns the differentiable all-to-all as the operator `ds_ring::swap_heads_tokens`. The U ranks of a Ulysses
# group hold consecutive parts of one ring shard; before the pass each gets the whole shard of H / U heads,
# after it everything goes back. Like every operator that sends, it agrees with all ranks of the sequence
# first; the checks of q, k and v are made here, before they are taken apart.

HEADS, TOKENS = 1, 2
T = TypeVar("T")


class Swap(NamedTuple):
    """One of the four all-to-alls of a step: which dimensions it splits and joins, its gradient's name."""

    split_dim: int
    join_dim: int
    gradient: str


# Two operations under five names: ranks agree on the name, so swaps of two places in a step cannot meet.
_SWAPS = {
    "Ulysses of q, k, v": Swap(HEADS, TOKENS, "Ulysses of dq, dk, dv"),
    "Ulysses of q and latents": Swap(HEADS, TOKENS, "Ulysses of dq, dk, dv"),
    "Ulysses of out": Swap(TOKENS, HEADS, "Ulysses of the gradient of out"),
    "Ulysses of the gradient of out": Swap(HEADS, TOKENS, "Ulysses of out"),
    "Ulysses of dq, dk, dv": Swap(TOKENS, HEADS, "Ulysses of q, k, v"),
}


@operator("ds_ring::swap_heads_tokens")
def swap_op(tensors: Sequence[Tensor], name: str, handle: int) -> list[Tensor]:
    """Run the all-to-all of that name, for each of some [B, H, S, D]."""
    context, refused = context_of(handle), None
    mesh, swap = context.mesh, _SWAPS[name]
    with mesh.in_call():
        latents = name == "Ulysses of q and latents"
        if latents or name == "Ulysses of q, k, v":  # what comes after them was made by this package
            try:
                q, k, v = tensors
                context.check(q, k, v, parts=mesh.ulysses_size, latents=latents)
            except RingError as error:
                refused = error
        context.agree(name, tensors[0], tensors[-1], refused)
        # A sequence of one rank has none; its all-to-all hands the parts back.
        exchange = context.exchange or Exchange(mesh)
        parts = [x.chunk(mesh.ulysses_size, dim=swap.split_dim) for x in tensors]
        received = exchange.all_to_all([_packed(one) for one in zip(*parts, strict=True)], mesh.ulysses_group)
        from_ranks = [_unpacked(one, [of_ranks[0] for of_ranks in parts]) for one in received]
        return [torch.cat(of_ranks, dim=swap.join_dim) for of_ranks in zip(*from_ranks, strict=True)]


# [Note: packets]
# All tensors of a place go in one message to each rank: an all-to-all costs its latency once and not three
# times. They may differ in dtype, so a packet is bytes, and wider elements stand first: each is aligned.
def _order(tensors: Sequence[Tensor]) -> list[int]:
    return sorted(range(len(tensors)), key=lambda index: -tensors[index].element_size())


def _packed(parts: Sequence[Tensor]) -> Tensor:
    if len(parts) == 1:
        return parts[0].contiguous()
    return torch.cat([parts[index].contiguous().view(-1).view(torch.uint8) for index in _order(parts)])


def _unpacked(packet: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return views of the tensors in a packet, with the shapes and dtypes of `like`."""
    if len(like) == 1:
        return [packet]
    sizes = [like[index].nbytes for index in _order(like)]
    found = dict(zip(_order(like), packet.split(sizes), strict=True))
    return [found[index].view(x.dtype).view(x.shape) for index, x in enumerate(like)]


@swap_op.register_fake
def _(tensors: Sequence[Tensor], name: str, handle: int) -> list[Tensor]:
    size, swap = context_of(handle).mesh.ulysses_size, _SWAPS[name]
    shapes = [list(x.shape) for x in tensors]
    for shape in shapes:
        shape[swap.split_dim] //= size
        shape[swap.join_dim] *= size
    return [x.new_empty(shape) for x, shape in zip(tensors, shapes, strict=True)]


def _setup_swap(ctx: Any, inputs: tuple[Sequence[Tensor], str, int], output: list[Tensor]) -> None:
    ctx.name, ctx.handle = inputs[1:]


def _backward_swap(ctx: Any, grads: list[Tensor]) -> tuple[list[Tensor], None, None]:
    return swap_op(grads, _SWAPS[ctx.name].gradient, ctx.handle), None, None


swap_op.register_autograd(_backward_swap, setup_context=_setup_swap)


def _over_heads(
    run: Callable[..., tuple[Tensor, Tensor]], q: Tensor, k: Tensor, v: Tensor, handle: int,
    ulysses_size: int, return_lse: bool, latents: bool = False,
) -> Any:  # fmt: skip
    """Return what `run` computes from q, k and v, for all heads, which Ulysses ranks share out meanwhile."""
    if ulysses_size == 1:
        out, lse = run(q, k, v)
        return (out, lse) if return_lse else out
    name = "Ulysses of q, k, v"
    if latents:  # every rank needs those of all tokens: an all-to-all of copies
        name = "Ulysses of q and latents"
        # what is no latent is refused there
        k, v = (x.expand(-1, ulysses_size, -1, -1) if x.shape[1:-2] == (1,) else x for x in (k, v))
    out, lse = run(*swap_op([q, k, v], name, handle))
    if not return_lse:
        return swap_op([out], "Ulysses of out", handle)[0]
    out, lse = swap_op([out, lse.unsqueeze(-1)], "Ulysses of out", handle)
    return out, lse.squeeze(-1)


def _pass_of(
    q: Tensor, k: Tensor, v: Tensor, context: RingContext, grad_out: Tensor | None = None,
    sinks: Tensor | None = None, has_grad_lse: bool = False, up: Tensor | None = None,
) -> RingPass | GatherPass | ReproduciblePass:  # fmt: skip
    """Return the pass of a context (backward if there is a gradient), after all ranks have agreed to it."""
    (plan, own, kernel, scale, chunk_bytes, offload, _), agreed = context.prepare(
        q, k, v, grad_out, sinks, has_grad_lse, up
    )
    if up is not None:
        assert isinstance(kernel, LatentKernel), "prepared without the up-projection"
        by_head = up.unflatten(0, (q.shape[1] * context.mesh.ulysses_size, -1))
        kernel = kernel.of(by_head[context.heads_here(q)], backward=grad_out is not None)
    ring_rank, options = context.mesh.ring_rank, context.options
    # The all-gather reference sends all heads at once: no chunks, no overlap, no buffers kept between calls.
    if options.transport == "all_gather":
        return GatherPass(plan, ring_rank, kernel, context.exchange, scale)
    if options.transport == "reproducible":
        return ReproduciblePass(plan, ring_rank, kernel, context.exchange, scale, options.block_size)
    buffers = context.mesh.buffers
    if isinstance(context.exchange, PullExchange) and not isinstance(q, FakeTensor):
        backward = grad_out is not None
        buffers, agreed = context.exchange.share(plan, kernel, q, k, v, backward, chunk_bytes, agreed)
    return RingPass(
        own,
        kernel,
        context.exchange,
        scale,
        options.overlap,
        chunk_bytes,
        buffers,
        context.check_finite if options.check_finite else None,
        trace=context.mesh.traces[-1] if context.mesh.traces else None,
        host=context.mesh.host_memory if offload else None,
        agreed=agreed,
        prepared=PreparedPasses() if context.exchange is None else context.exchange.prepared,
    )


def _run(
    made: RingPass | GatherPass | ReproduciblePass | ReplicatedPass, work: Callable[..., Any], *tensors: Any
) -> Any:
    """Run a pass; tell the other ranks if it raises, since they would otherwise wait for this rank."""
    try:
        return work(*tensors)
    except BaseException as error:
        if isinstance(made.exchange, Exchange):
            made.exchange.failed(error)
        raise


def _forward(
    context: RingContext, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None,
    up: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return (out, lse) of a pass, or those that a checkpointed region has kept."""
    options, memory = context.options, context.mesh.host_memory

    def run(context: RingContext = context) -> tuple[Tensor, Tensor]:
        # A refused call sends nothing, so the mesh can still be used after it.
        made = _pass_of(q, k, v, context, sinks=sinks, up=up)
        here = sinks if sinks is None else sinks[context.heads_here(q)]
        out, lse = _run(made, made.forward, q, k, v, here)
        return out, lse

    with context.mesh.in_call():
        if options.recompute == 1 or isinstance(q, FakeTensor):
            return run()
        rows = None
        if options.recompute:
            first, slots = first_queries(context, q.shape[2], q.device)
            rows = KeptRows(slots, lambda: run(first))
        call = (context.handle, q.shape, k.shape, v.shape, q.dtype, up is None)
        return kept_or_run(call, run, memory if memory.enabled else None, rows)


def _gradients(
    context: RingContext, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    grad_lse: Tensor | None = None, up: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return (dq, dk, dv) of a pass, see `RingPass.backward`; with latents also that of `up`."""
    with context.mesh.in_call():
        q_here, k_here, v_here = q, k, v
        if q.device != grad_out.device:  # shapes and dtypes, where they take no memory
            q_here, k_here, v_here = (
                torch.zeros((), dtype=x.dtype, device=grad_out.device).expand(x.shape) for x in (q, k, v)
            )
        has_grad_lse = grad_lse is not None
        made = _pass_of(q_here, k_here, v_here, context, grad_out, has_grad_lse=has_grad_lse, up=up)
        dq, dk, dv = _run(made, made.backward, grad_out, q, k, v, out, lse, grad_lse)
        if up is None:
            return dq, dk, dv
        assert isinstance(made.kernel, LatentKernel) and made.kernel.gradient is not None
        gradient, of_up = made.kernel.gradient, torch.zeros(up.shape, dtype=up.dtype, device=up.device)
        of_up.unflatten(0, (-1, gradient.shape[1]))[context.heads_here(q)].copy_(gradient)
        return dq, dk, dv, of_up


@operator("ds_ring::ring_attention")
def ring_attention_op(
    q: Tensor, k: Tensor, v: Tensor, handle: int, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of local q [B, H, S, D] over the ring's k [B, G, S, D] and v [B, G, S, E].

    See `RingPass.forward`. The sinks are those of the heads of all Ulysses ranks.
    """
    return _forward(context_of(handle), q, k, v, sinks)


def fake_results(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return fake (out, lse), used while a graph is traced."""
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    return out, q.new_empty(q.shape[:-1], dtype=accumulator_dtype(q.dtype))


# The backward pass is an operator, too, so that the backward graph also has one opaque node for the pass.
@operator("ds_ring::ring_attention_backward")
def ring_attention_backward_op(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, handle: int,
    grad_lse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return (dq, dk, dv); see `RingPass.backward`."""
    dq, dk, dv = _gradients(context_of(handle), grad_out, q, k, v, out, lse, grad_lse)
    return dq, dk, dv


def _save(
    ctx: Any, context: RingContext, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor], eager: bool,
    *, up: Tensor | None = None,
) -> None:  # fmt: skip
    q, k, v, _, sinks = inputs
    ctx.eager = eager
    # Save no hop's K/V: they travel again in the backward pass, which keeps memory at O(T / P).
    saved = (q, k, v, *output)
    ctx.context = context  # keeps it alive until the backward pass
    if context.options.offload_on(q.device.type, q.shape[2]):
        saved = saved_on_host(saved, context.mesh.host_memory)
    ctx.save_for_backward(*saved, sinks, *(() if up is None else (up,)))
    ctx.set_materialize_grads(False)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _save(ctx, context_of(inputs[3]), inputs, output, eager=False)


def _backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, sinks = ctx.saved_tensors
    context: RingContext = ctx.context
    if grad_out is None:  # run the pass nevertheless: another rank may need this rank's part of a gradient
        device = out.device if grad_lse is None else grad_lse.device
        grad_out = torch.zeros_like(out, device=device)
    given = (q, k, v, out, lse)
    if ctx.eager and not torch.is_grad_enabled() and _sees_plain((*given, grad_out)):
        grads = _gradients(context, grad_out, *given, grad_lse)
    else:
        grads = ring_attention_backward_op(grad_out, *given, context.handle, grad_lse)
    if sinks is None:
        return (*grads, None, None)
    return (*grads, None, sinks_gradient(sinks, context.heads_here(q), grad_out, out, lse, grad_lse))


class _EagerAttention(torch.autograd.Function):
    """The pass of an eager call: as `ring_attention_op`, with the context in place of its handle."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, context: RingContext, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        results = _forward(context, q, k, v, sinks)
        _save(ctx, context, (q, k, v, context, sinks), results, eager=True)
        return results

    backward = staticmethod(_backward)


_PLAIN = {Tensor, torch.nn.Parameter, type(None)}


def _sees_plain(tensors: Sequence[Tensor | None]) -> bool:
    """Return whether nothing but autograd looks at these tensors: no transform, mode or subclass."""
    if peek_interpreter_stack() is not None or torch._C._len_torch_dispatch_stack():
        return False
    # of `is_grads_batched=True`: an operator is called for one gradient after the other
    for x in tensors:
        if x is not None and is_legacy_batchedtensor(x):
            return False
    return set(map(type, tensors)) <= _PLAIN


def sinks_gradient(
    sinks_H: Tensor | None, heads: slice, grad_out: Tensor, out: Tensor, lse: Tensor, grad_lse: Tensor | None
) -> Tensor | None:
    """Return the gradient of the sinks from this rank's queries, whose heads are `heads`; 0 for other heads.

    A sink is a key whose value is 0, so this is -sum over the rows of
    exp(sink - lse) (sum(out grad_out) - grad_lse).
    """
    if sinks_H is None:
        return None
    if out.device == grad_out.device:
        delta = (out.to(lse.dtype) * grad_out).sum(-1)
    else:  # head by head, if out is on the host
        by_head = zip(out.unbind(1), grad_out.unbind(1), strict=True)
        delta = torch.stack([(o.to(g.device, lse.dtype) * g).sum(-1) for o, g in by_head], dim=1)
    lse = lse.to(delta.device)
    if grad_lse is not None:
        delta = delta - grad_lse
    # A row without keys and sinks has lse -inf; the clamp prevents a NaN.
    weights = torch.exp(sinks_H[heads].unsqueeze(-1) - lse.clamp_min(torch.finfo(lse.dtype).min))
    found = -(weights * delta).sum((0, 2)).to(sinks_H.dtype)
    first, end, _ = heads.indices(len(sinks_H))
    return pad(found, (first, len(sinks_H) - end))


def _refuse_second_derivative(ctx: Any, *grads: Tensor | None) -> NoReturn:
    raise RingConfigError(
        "ring attention: expected a first derivative, got a request for the second one (create_graph=True,"
        " then a gradient of that gradient); differentiate once, or use a model with plain attention for it"
    )


def register(forward: Any, backward: Any, setup: Callable[..., None], gradients: Callable[..., Any]) -> None:
    """Register fake results and gradients of an operator, and those of the operator for its gradients."""
    # Fake results are contiguous, whatever the strides of q: they must have the strides of real ones.
    forward.register_fake(lambda q, k, v, *_: fake_results(q, v))
    backward.register_fake(lambda _, q, k, v, *more: tuple(x.new_empty(x.shape) for x in (q, k, v)))
    forward.register_autograd(gradients, setup_context=setup)
    backward.register_autograd(_refuse_second_derivative, setup_context=lambda ctx, inputs, output: None)


register(ring_attention_op, ring_attention_backward_op, _setup, _backward)


# [Note: latents on the wire]
# With an up-projection, k and v of a pass are latents [B, 1, S, L] and rotary keys [B, 1, S, R]: one K/V
# head, for which plan, schedule and exchange need nothing new. `LatentKernel` expands them where they arrive,
# again in the backward pass. On each rank the gradient of the up-projection is the part of this rank's
# queries: sum it over the sequence's ranks, as for other replicated parameters.
@operator("ds_ring::latent_attention")
def latent_attention_op(
    q: Tensor, latent: Tensor, rope: Tensor, up: Tensor, handle: int, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of q [B, H, S, N + R] over latents; `up` is that of all heads, [H * (N + E), L]."""
    return _forward(context_of(handle), q, latent, rope, sinks, up)


@latent_attention_op.register_fake
def _(
    q: Tensor, latent: Tensor, rope: Tensor, up: Tensor, handle: int, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    width = latent_value_dim(q, rope, up, q.shape[1] * context_of(handle).mesh.ulysses_size)
    return fake_results(q, rope.new_empty((0, max(width, 1))))  # what does not fit is refused by the operator


@operator("ds_ring::latent_attention_backward")
def latent_attention_backward_op(
    grad_out: Tensor, q: Tensor, latent: Tensor, rope: Tensor, up: Tensor, out: Tensor, lse: Tensor,
    handle: int, grad_lse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q, latent, rope and up."""
    context = context_of(handle)
    dq, d_latent, d_rope, d_up = _gradients(context, grad_out, q, latent, rope, out, lse, grad_lse, up)
    return dq, d_latent, d_rope, d_up


latent_attention_backward_op.register_fake(
    lambda _, q, latent, rope, up, *more: tuple(x.new_empty(x.shape) for x in (q, latent, rope, up))
)


def _setup_latents(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, latent, rope, up, handle, sinks = inputs
    _save(ctx, context_of(handle), (q, latent, rope, handle, sinks), output, eager=False, up=up)


def _backward_latents(
    ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None
) -> tuple[Tensor | None, ...]:
    q, latent, rope, out, lse, sinks, up = ctx.saved_tensors
    if grad_out is None:  # as in `_backward`
        grad_out = torch.zeros_like(out, device=up.device)
    handle = ctx.context.handle
    grads = latent_attention_backward_op(grad_out, q, latent, rope, up, out, lse, handle, grad_lse)
    if sinks is None:
        return (*grads, None, None)
    heads = ctx.context.heads_here(q)
    return (*grads, None, sinks_gradient(sinks, heads, grad_out, out, lse, grad_lse))


latent_attention_op.register_autograd(_backward_latents, setup_context=_setup_latents)
latent_attention_backward_op.register_autograd(
    _refuse_second_derivative, setup_context=lambda ctx, inputs, output: None
)


@operator("ds_ring::replicated_attention")
def replicated_attention_op(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor | None, handle: int, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of q [B, H, Q, D], equal on all ranks, over the ring's k, v; see `ReplicatedPass`.

    The positions are a tensor, so that a compiled graph of a decoding loop takes the step as an input.
    """
    context = context_of(handle)
    with context.mesh.in_call():
        made = ReplicatedPass(*context.prepare_replicated(q, k, v, positions, sinks=sinks))
        out, lse = _run(made, made.forward, q, k, v, sinks)
        return out, lse


@operator("ds_ring::replicated_attention_backward")
def replicated_attention_backward_op(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, positions: Tensor | None, out: Tensor, lse: Tensor,
    handle: int, grad_lse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return (dq, dk, dv); see `ReplicatedPass.backward`."""
    context = context_of(handle)
    with context.mesh.in_call():
        of_lse = grad_lse is not None
        made = ReplicatedPass(*context.prepare_replicated(q, k, v, positions, grad_out, has_grad_lse=of_lse))
        dq, dk, dv = _run(made, made.backward, grad_out, q, k, v, out, lse, grad_lse)
        return dq, dk, dv


def _setup_replicated(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, positions, handle, sinks = inputs
    ctx.save_for_backward(q, k, v, positions, *output, sinks)
    ctx.context = context_of(handle)  # keep it alive until the backward pass
    ctx.set_materialize_grads(False)


def _backward_replicated(
    ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None
) -> tuple[Tensor | None, ...]:
    *given, out, lse, sinks = ctx.saved_tensors
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    grads = replicated_attention_backward_op(grad_out, *given, out, lse, ctx.context.handle, grad_lse)
    return (*grads, None, None, sinks_gradient(sinks, slice(None), grad_out, out, lse, grad_lse))


register(replicated_attention_op, replicated_attention_backward_op, _setup_replicated, _backward_replicated)


# Register the operator `ds_ring::placed_attention`: its context is data and no constant of the graph.
#
# Owns the number under which a graph finds a placement while it runs, and the operator that reads it.

BatchRows = tuple[int, ...]


@dataclass(eq=False)
class Placed:
    """Hold the attention of a batch, under a number in a graph: contexts, and the rows that each is for.

    Every rank has the parts in the same order. One part without rows is for all of them.
    """

    parts: tuple[tuple[RingContext, BatchRows], ...]
    handle: int = field(init=False)

    def __post_init__(self) -> None:
        self.handle = new_handle(self)

    def fill(self, make: Callable[[], Sequence[Tensor]], work: Callable[..., Any], *given: Tensor) -> Any:
        """Return `work(context, *given)`, with several parts in the tensors of `make`, row by row.

        A batch of another size is refused, on all ranks.
        """
        rows = sum(len(rows) for _, rows in self.parts)
        if rows not in (0, len(given[0])):
            why = (
                f"attention: expected the {rows} samples of the batch, whose documents differ, got"
                f" {len(given[0])}; hand the model the whole batch that shard_batch returned"
            )
            refuse(self.parts[0][0].mesh, RingShapeError(why))
        if not self.parts[0][1]:
            return work(self.parts[0][0], *given)
        results = make()
        for context, part_rows in self.parts:
            index = list(part_rows)
            for whole, part in zip(results, work(context, *(x[index] for x in given)), strict=True):
                whole[index] = part
        return results


# [Note: placements in compiled code]
# A model that knows nothing of the ring is compiled once for a length of local tokens, and many global
# lengths, and every set of packed documents, have that length. A handle written into the graph would attend
# with the layout of the batch that was traced. So the graph computes the handle in every run
# (`place_attention` in graph_sharding.py), as an int64 [1] on the CPU, and attention takes it as a tensor;
# the backward pass gets the one that its forward pass had.
@operator("ds_ring::placed_attention")
def placed_attention_op(q: Tensor, k: Tensor, v: Tensor, which: Tensor) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of local q [B, H, S, D] over the ring's k, v [B, G, S, D]; `which` is int64 [1]."""

    def attention(context: RingContext, q: Tensor, k: Tensor, v: Tensor) -> Any:
        run = partial(_forward, context)
        return _over_heads(run, q, k, v, context.handle, context.mesh.ulysses_size, return_lse=True)

    return object_of(int(which), Placed).fill(lambda: fake_results(q, v), attention, q, k, v)


@operator("ds_ring::placed_attention_backward")
def placed_attention_backward_op(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, which: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv)."""

    given = (grad_out, q, k, v, out, lse)
    return object_of(int(which), Placed).fill(
        lambda: tuple(x.new_empty(x.shape) for x in (q, k, v)), _all_gradients, *given
    )


def _all_gradients(
    context: RingContext, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> Sequence[Tensor]:
    """Return (dq, dk, dv) of all heads."""
    if context.mesh.ulysses_size == 1:
        return _gradients(context, grad_out, q, k, v, out, lse)
    # Saved are the tensors of this rank's tokens, as large as without Ulysses: they are swapped again.
    q, k, v = swap_op([q, k, v], "Ulysses of q, k, v", context.handle)
    results = [grad_out, out, lse.unsqueeze(-1)]
    grad_out, out, lse = swap_op(results, "Ulysses of the gradient of out", context.handle)
    grads = _gradients(context, grad_out, q, k, v, out, lse.squeeze(-1))
    return swap_op(grads, "Ulysses of dq, dk, dv", context.handle)


def _setup_placed(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
    *given, which = inputs
    ctx.save_for_backward(*given, *output, which)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward_placed(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    if grad_out is None:  # every rank must go through the pass: another rank's gradient may need it
        grad_out = torch.zeros_like(saved[3])
    return (*placed_attention_backward_op(grad_out, *saved), None)


register(placed_attention_op, placed_attention_backward_op, _setup_placed, _backward_placed)


# The calls behind `ring_attention` and `RingAttention`. An eager call carries its context, and a refused one
# raises at once, after the other ranks were told. A compiled call carries a handle ([Note: handles in
# compiled code]), and a refused one the handle of a context whose calls raise.

Settings = tuple[Any, ...]  # the first options of `Options`, in order


# Patterns and score_mods that a compiled function may make itself, with their fields: see [Note: handles in
# compiled code]. Others are handed over as objects.
_MADE_OF: tuple[tuple[type, tuple[str, ...]], ...] = (
    (Causal, ()),
    (Full, ()),
    (SlidingWindow, ("window", "causal")),
    (DilatedWindow, ("window", "rate", "causal")),
    (Sinks, ("sinks", "causal")),
    (Chunked, ("chunk", "causal")),
    (PrefixLM, ("prefix",)),
    (Dilated, ("segment_lengths", "dilation_rates", "causal", "head_offsets")),
    (Intersection, ("first", "second")),
    (Union, ("first", "second")),
    (Softcap, ("cap",)),
    (Alibi, ("slopes",)),
)
_PARTS, _OBJECT = "ds_ring parts", "ds_ring object"


def described(value: Any, objects: list[Any]) -> Any:
    """Return a pattern or a score_mod as constants; what is none is put into `objects`. Traced by Dynamo."""
    for kind, names in _MADE_OF:
        if type(value) is kind:
            return (_PARTS, kind, *[described(getattr(value, name), objects) for name in names])
    if type(value) is MaskMod and value.made_in_a_graph:
        objects.append(value.function)
        return (_PARTS, MaskMod, (_OBJECT, len(objects) - 1), value.is_known_causal)
    if isinstance(value, tuple):
        return tuple([described(one, objects) for one in value])
    if value is None or isinstance(value, (bool, int, float, str)):
        return constant(value)
    objects.append(value)
    return _OBJECT, len(objects) - 1


def _made_again(value: Any, objects: tuple[Any, ...]) -> Any:
    """Return what `described` was given."""
    if isinstance(value, tuple) and value[:1] == (_PARTS,):
        return value[1](*(_made_again(one, objects) for one in value[2:]))
    if isinstance(value, tuple) and value[:1] == (_OBJECT,):
        found = objects[value[1]]
        lost = is_dataclass(found) and any(one.init and not hasattr(found, one.name) for one in fields(found))
        if lost:
            kind = type(found).__name__
            raise RingConfigError(
                f"{kind}: expected one that is made outside of the compiled function, got one that is made"
                f" inside, whose attributes torch.compile does not hand over; make the {kind} before the call"
            )
        return found
    if isinstance(value, tuple) and not is_constant(value):
        return tuple(_made_again(one, objects) for one in value)
    return number_of(value)


def context_of_call(
    pattern: Pattern,
    layout: Layout | str,
    mesh: RingMesh,
    settings: Settings,
    score_mod: ScoreFunction | None,
) -> RingContext:
    """Return the context of an eager call; refused arguments raise on all ranks."""
    check_mesh(mesh)
    key: tuple[Any, ...] = ()
    found: RingContext | None = None
    with suppress(Exception):  # what cannot be hashed or compared is refused below, by name
        if score_mod is None:
            key = (pattern, layout, settings, tuple(map(type, settings)))  # the types tell 1 from True
            found = mesh.recent.get(key)
    if found is None:
        try:
            found = _made_context(pattern, layout, mesh, settings, score_mod)
        except RingError as error:
            refuse(mesh, error)
        # Functions are not kept here: the values that they captured may change.
        if key and not pattern.masks:
            mesh.recent[key] = found
    return found


def _made_context(
    pattern: Pattern, layout: Layout | str, mesh: RingMesh, settings: Settings,
    score_mod: ScoreFunction | None, keeps_functions: bool = False,
) -> RingContext:  # fmt: skip
    """Return the context of these arguments, or raise the RingError that refuses one of them."""
    mod = None if score_mod is None else ScoreMod.lookup(score_mod)
    options = Options(*settings, score_mod=mod)  # type: ignore[misc]
    return context_for(pattern, layout, mesh, options, keeps_functions)


def handle_of(
    pattern: Pattern, layout: Layout | str, mesh: RingMesh, settings: Settings,
    score_mod: ScoreFunction | None, why_not: str | None,
) -> int:  # fmt: skip
    """Return the handle of a call, in a function that torch.compile traces.

    `why_not` says why the call cannot be honoured, if it is known already.
    """
    objects: list[Any] = []
    asked = described(pattern, objects), described(score_mod, objects)
    return _handle_of(*asked, layout, mesh, tuple([constant(x) for x in settings]), why_not, *objects)


@constant_in_graphs
def _handle_of(
    pattern: Any, score_mod: Any, layout: Layout | str, mesh: RingMesh, settings: Settings,
    why_not: str | None, *objects: Any,
) -> int:  # fmt: skip
    check_mesh(mesh)
    try:
        if why_not is not None:
            raise RingConfigError(why_not)
        asked = _made_again(pattern, objects)
        numbers = tuple(map(number_of, settings))
        mod = _made_again(score_mod, objects)
        context = _made_context(asked, layout, mesh, numbers, mod, keeps_functions=True)
    except RingError as error:
        context = refusing_context(mesh, error)
    context.in_a_graph = True
    return context.handle


@constant_in_graphs
def refusing_handle(mesh: RingMesh, why: str, error: type[RingError] = RingConfigError) -> int:
    """Return the handle of a context whose calls are refused, on all ranks: for compiled calls."""
    context = refusing_context(mesh, error(why))
    context.in_a_graph = True
    return context.handle


@constant_in_graphs
def _differentiable(handle: int) -> int:
    """Return the handle, or a refusing one for derivatives that the operator would lose silently."""
    context = context_of(handle)
    why = why_not_this_derivative() or _why_not_this_gradient(context)
    return handle if why is None else refusing_handle(context.mesh, why)


def _why_not_this_gradient(context: RingContext) -> str | None:
    mod = context.options.score_mod
    return None if mod is None else mod.why_not_this_gradient()


@constant_in_graphs
def _refuse(handle: int, why: str) -> NoReturn:
    refuse(context_of(handle).mesh, RingShapeError(why))


def _check_operands(
    q: Tensor, k: Tensor, v: Tensor, handle: int, sinks: Tensor | None, return_lse: object,
    up: Tensor | None = None,
) -> None:  # fmt: skip
    """Refuse what the operator's body would not get to see, for all ranks to hear."""
    optional = {"sinks": sinks, "up_projection": up}
    for name, x in {"q": q, "k": k, "v": v, **optional}.items():
        why = None if x is None and name in optional else why_not_an_operand(name, x)
        if why is not None:
            _refuse(handle, why)
    if not isinstance(return_lse, bool):
        _refuse(handle, f"return_lse: expected True or False, got {shown(return_lse)}; use a bool")


def _check_eager(
    context: RingContext, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, return_lse: object,
    up: Tensor | None = None,
) -> None:  # fmt: skip
    """Do the checks of a compiled call; ordinary dense tensors pass at once."""
    usual = return_lse is True or return_lse is False
    given = (q, k, v) if sinks is None else (q, k, v, sinks)
    for x in given if up is None else (*given, up):
        usual = usual and type(x) is Tensor and x.layout is torch.strided
        usual = usual and not (x.is_meta or x.is_nested or x.is_quantized)
    if not usual:
        _check_operands(q, k, v, context.handle, sinks, return_lse, up)
    if peek_interpreter_stack() is not None or forward_ad._current_level >= 0:
        why = why_not_this_derivative()
        if why is not None:  # functorch would raise before the operator's body
            refuse(context.mesh, RingConfigError(why))
    why = _why_not_this_gradient(context)
    if why is not None:
        refuse(context.mesh, RingConfigError(why))


def attend(
    q: Tensor, k: Tensor, v: Tensor, context: RingContext, sinks: Tensor | None, return_lse: bool,
    up: Tensor | None = None,
) -> Any:  # fmt: skip
    """Return out [B, H, S, E] of queries that are sharded; with `return_lse` (out, lse). Eager."""
    _check_eager(context, q, k, v, sinks, return_lse, up)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Any:
        if up is not None:
            return latent_attention_op(q, k, v, up, context.handle, sinks)
        # By the operator if a transform, a mode or a subclass must see one node.
        if _sees_plain((q, k, v, sinks)):
            return _EagerAttention.apply(q, k, v, context, sinks)
        return ring_attention_op(q, k, v, context.handle, sinks)

    where = context.handle, context.mesh.ulysses_size
    return _over_heads(run, q, k, v, *where, return_lse, latents=up is not None)


def attend_compiled(
    q: Tensor, k: Tensor, v: Tensor, handle: int, ulysses_size: int, sinks: Tensor | None, return_lse: bool,
    up: Tensor | None = None,
) -> Any:  # fmt: skip
    """Do what `attend` does, in a function that torch.compile traces."""
    handle = _differentiable(handle)
    _check_operands(q, k, v, handle, sinks, return_lse, up)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Any:
        if up is not None:
            return latent_attention_op(q, k, v, up, handle, sinks)
        return ring_attention_op(q, k, v, handle, sinks)

    return _over_heads(run, q, k, v, handle, ulysses_size, return_lse, latents=up is not None)


def attend_replicated(
    q: Tensor, k: Tensor, v: Tensor, handle: int, q_positions: Sequence[int] | Tensor | None,
    sinks: Tensor | None, return_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Return out [B, H, Q, E] of queries that every rank has; with `return_lse` (out, lse)."""
    if torch.compiler.is_compiling():
        handle = _differentiable(handle)
        _check_operands(q, k, v, handle, sinks, return_lse)
    else:
        _check_eager(context_of(handle), q, k, v, sinks, return_lse)
    if q_positions is not None and not isinstance(q_positions, Tensor):
        try:
            q_positions = torch.as_tensor(q_positions)
        except Exception:
            got = shown(q_positions).removeprefix("list ")
            _refuse(handle, f"q_positions: expected a 1-D list of integers, got {got}; pass a tensor")
    results = replicated_attention_op(q, k, v, q_positions, handle, sinks)
    return results if return_lse else results[0]
