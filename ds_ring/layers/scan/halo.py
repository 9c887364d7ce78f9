"""Copy the few tokens before and after each run of a shard: `halo`, and `shift_sequence`, which calls it.

Owns the operator `ds_ring::halo`. The gradient of a copy is added at the token's owner.
"""

from __future__ import annotations

from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from ds_ring.comm.collective import collective
from ds_ring.comm.mesh import RingMesh, check_mesh
from ds_ring.comm.streams import is_fake
from ds_ring.compat.torch import operator
from ds_ring.errors import RingPatternError, RingShapeError, check_whole_number
from ds_ring.layers.scan.context import ScanContext, get_scan_handle, scan_context
from ds_ring.layers.scan.sequence_runs import halo_messages, other_documents
from ds_ring.masks.slots import IntArray
from ds_ring.ops.bits import ADDED_UP, check_copied, fill_bits, view_as_bits, view_from_bits
from ds_ring.ops.checks import check_operand
from ds_ring.ops.context import get_object
from ds_ring.ops.eager import run_compared
from ds_ring.ops.layer_gradients import has_run_again, note_call
from ds_ring.ops.passes import count_forward_pass, get_forward_call, run_gradient
from ds_ring.ops.tracing import constant, forbid_tracing
from ds_ring.patterns.documents.pattern import Documents, Tree
from ds_ring.schedule.layout import Layout

Indices = dict[int, IntArray]  # by rank of the sequence


def halo(
    x: Tensor, before: int, after: int = 0, *, dim: int, layout: Layout, mesh: RingMesh,
    documents: Documents | Tree | None = None, hop_timeout_s: float = 60.0,
) -> Tensor:  # fmt: skip
    """Return the tokens before and after each run of this rank's shard. Differentiable.

    Args:
        x: local shard, any dtype, with S slots in `dim`: layout.local_tokens over the Ulysses size.
        before, after: numbers of tokens before and after each run; their sum at least 1.
        dim: the token dimension.
        layout: the rank and slot of each token; its runs have no gaps (zigzag, contiguous, balanced).
        mesh: this process's place; every rank of the sequence must call.
        documents: tokens of another document are zeros, as are those outside the sequence. With a `Tree`
            the tokens before a run are those of its path; `after` must be 0, as a path may go on in several.
        hop_timeout_s: seconds after which a message that has not arrived raises.

    Returns:
        The shape of x with [R, before + after] in place of S, for the R runs of this rank in slot order
        (`layout.runs`, cut where Ulysses ranks share a shard, and where nodes of a tree begin). The gradient
        of a copy is added at its owner. Use the copies on every rank, even where they are zeros: each rank
        takes part in the backward pass.

    Raises:
        RingShapeError: a length that is not the layout's, or `before` and `after` are not whole numbers; in
            the backward pass a gradient of a dtype that torch does not add up.
        RingLayoutError: a layout whose runs have gaps (striped, residue), or for another ring.
        RingPatternError: documents of another length, or `after` with a tree.
        RingMismatchError: ranks that call with different arguments; nothing was sent.
        RingPeerError: another rank failed or was too late.
    """
    handle = get_scan_handle(layout, mesh, documents, constant(hop_timeout_s))
    if not torch.compiler.is_compiling():
        with collective(mesh, "halo"):  # else the dispatcher refuses it alone, and prints every number
            check_operand("halo: x", x)
            check_copied("halo", x)
            if not _is_whole_number(dim):
                raise RingShapeError.wrong("halo: dim", "a whole number", dim, "name the token dimension")
            _check_counts(before, after)
    if -x.dim() <= dim < 0:
        dim += x.dim()
    return run_compared(mesh, "halo", halo_op, x, dim, before, after, handle)


@forbid_tracing
def shift_sequence(
    x: Tensor, offset: int, *, dim: int, layout: Layout, mesh: RingMesh,
    documents: Documents | Tree | None = None, fill: float = 0, hop_timeout_s: float = 60.0,
) -> Tensor:  # fmt: skip
    """Return x[position + offset] for each local token. Differentiable.

    A sharded sequence cannot be shifted by slicing: the token after a run is on another rank. For labels, for
    the embeddings and labels of multi-token prediction (DeepSeek-AI 2024, DeepSeek-V3, section 2.2), and with
    a negative offset for token shifts (RWKV).

    Args:
        x: local shard, any dtype, with S slots in `dim`.
        offset: how many positions, not 0; negative for tokens in front.
        dim, layout, mesh, documents, hop_timeout_s: see `halo`.
        fill: value of x's dtype where there is no such token: outside the sequence, in another document, in
            padding. The same on all ranks.

    Returns:
        The shape of x.

    Raises:
        RingShapeError: offset is 0 or no whole number, or fill is no value of x's dtype.
        RingError: as in `halo`.
    """
    check_mesh(mesh)
    with collective(mesh, "shift_sequence", alone=is_fake(x)) as call:
        raw: Any = offset
        is_number = _is_whole_number(raw)
        if not is_number or raw:
            check_whole_number(abs(raw) if is_number else raw, "shift_sequence: offset", RingShapeError)
        check_operand("shift_sequence: x", x)
        check_copied("shift_sequence", x)
        fill_of_bits = fill_bits("shift_sequence: fill", fill, x)
        call.agree({"fill": fill})
    before, after = max(-offset, 0), max(offset, 0)
    named: dict[str, Any] = {"layout": layout, "mesh": mesh, "documents": documents}
    named["hop_timeout_s"] = hop_timeout_s
    copies = halo(x, before, after, dim=dim, **named)
    context, dim = scan_context(**named), dim % x.dim()
    dtype, x, copies = x.dtype, view_as_bits(x), view_as_bits(copies)
    # Also a rank without tokens takes part in the backward pass.
    parts, runs = [x.narrow(dim, 0, 0) + copies.flatten()[:0].sum().to(x.dtype)], context.runs
    for number, run in enumerate(runs.list_rank_runs(mesh.sequence_rank).tolist()):
        tokens, beside = (
            x.narrow(dim, int(runs.slots[run]), int(runs.lengths[run])),
            copies.select(dim, number),
        )
        both = torch.cat([tokens, beside] if offset > 0 else [beside, tokens], dim=dim)
        parts.append(both.narrow(dim, after, tokens.shape[dim]))
    padding = x.shape[dim] - sum(part.shape[dim] for part in parts)
    shifted = torch.cat([*parts, x.narrow(dim, 0, padding)], dim=dim)
    exists = context.exists(offset, x.device).view(-1, *[1] * (x.dim() - 1 - dim))
    return view_from_bits(torch.where(exists, shifted, torch.full_like(shifted, fill_of_bits)), dtype)


def _clear_other_documents(context: ScanContext, before: int, after: int, copies: Tensor) -> None:
    """Set the copies [R * (before + after), ...] of tokens of another document to 0."""
    if isinstance(context.documents, Documents):
        parts, rank = context.mesh.ulysses_size, context.mesh.sequence_rank
        index = other_documents(context.layout, parts, rank, before, after, context.documents)
        copies.index_fill_(0, context.tables.array(index, copies.device), 0)


def _swapped(
    context: ScanContext, rows: Tensor, sends: Indices, receives: Indices
) -> list[tuple[Tensor, Tensor]]:
    """Send rows to other ranks; return the rows of each of them, and the index of their place here."""
    index_of = {peer: context.tables.array(index, rows.device) for peer, index in receives.items()}
    arrived = {peer: rows.new_empty((len(index), *rows.shape[1:])) for peer, index in index_of.items()}
    context.swap(
        {peer: rows[context.tables.array(index, rows.device)] for peer, index in sends.items()}, arrived
    )
    return [(index, arrived[peer]) for peer, index in index_of.items()]


@operator("ds_ring::halo")
def halo_op(x: Tensor, dim: int, before: int, after: int, handle: int) -> Tensor:
    """Return the copies of `halo`: [..., R, before + after, ...]."""
    context = get_object(handle, ScanContext)
    mesh, rank = context.mesh, context.mesh.sequence_rank
    with collective(mesh, "halo", context.exchange) as call:
        _check_halo(x, dim, before, after, context)
        shape = tuple(x.shape)
        rows = view_as_bits(x).movedim(dim, 0)
        context.agree(call, before=before, after=after, shape=shape, dim=dim, dtype=x.dtype)
        count_forward_pass()
        messages = halo_messages(context.layout, mesh.ulysses_size, rank, before, after, context.tree)
        count = context.own_runs
        copies = rows.new_zeros((count * (before + after), *rows.shape[1:]))
        slots, places = (context.tables.array(index, x.device) for index in messages.local)
        copies[places] = rows[slots]
        for index, received in _swapped(context, rows, messages.sends, messages.receives):
            copies[index] = received
        _clear_other_documents(context, before, after, copies)
        copies = copies.unflatten(0, (count, before + after)).movedim((0, 1), (dim, dim + 1))
        return view_from_bits(copies.contiguous(), x.dtype)


def _check_halo(x: Tensor, dim: int, before: int, after: int, context: ScanContext) -> None:
    check_operand("halo: x", x)
    _check_counts(before, after)
    if not before and not after:
        raise RingShapeError("halo: expected before or after above 0, got 0 for both; leave the call out")
    if after and context.tree is not None:
        raise RingPatternError.wrong("halo: after", "0 with a tree", after, "take the tokens before each run")
    slots = context.runs.local_tokens
    if not 0 <= dim < x.dim() or x.shape[dim] != slots:
        raise RingShapeError.wrong(
            "halo", f"{slots} slots in dim {dim}", list(x.shape), "pass this rank's shard, and its layout"
        )


def _is_whole_number(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _check_counts(before: int, after: int) -> None:
    for name, value in (("before", before), ("after", after)):
        if type(value) is not int or value:
            check_whole_number(value, f"halo: {name}", RingShapeError)


@operator("ds_ring::halo_backward")
def halo_backward_op(grad: Tensor, dim: int, before: int, after: int, slots: int, handle: int) -> Tensor:
    """Return dx [..., S, ...] of the gradient of the copies [..., R, before + after, ...]."""
    context = get_object(handle, ScanContext)
    mesh, rank = context.mesh, context.mesh.sequence_rank
    shape = (*grad.shape[:dim], *grad.shape[dim + 1 :])  # the number of runs may differ by rank
    with collective(mesh, "halo backward", context.exchange) as call:
        if view_as_bits(grad) is not grad:
            raise RingShapeError.wrong("halo", ADDED_UP, f"{grad.dtype}", "cast x, or detach it")
        context.agree(call, before=before, after=after, shape=shape, dim=dim, dtype=grad.dtype)
        messages = halo_messages(context.layout, mesh.ulysses_size, rank, before, after, context.tree)
        rows = grad.movedim((dim, dim + 1), (0, 1)).flatten(0, 1).clone()
        _clear_other_documents(context, before, after, rows)
        dx = grad.new_zeros((slots, *rows.shape[1:]))
        own_slots, places = (context.tables.array(index, grad.device) for index in messages.local)
        dx.index_add_(0, own_slots, rows[places])
        for index, received in _swapped(context, rows, messages.receives, messages.sends):
            dx.index_add_(0, index, received)
        return dx.movedim(0, dim).contiguous()


halo_op.register_fake(
    lambda x, dim, before, after, handle: x.new_empty(
        (*x.shape[:dim], get_object(handle, ScanContext).own_runs, before + after, *x.shape[dim + 1 :])
    )
)
halo_backward_op.register_fake(
    lambda grad, dim, before, after, slots, handle: grad.new_empty(
        (*grad.shape[:dim], slots, *grad.shape[dim + 2 :])
    )
)


def _setup_halo(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ctx.dim, ctx.before, ctx.after, handle = inputs
    ctx.slots, ctx.context = (
        x.shape[ctx.dim],
        get_object(handle, ScanContext),
    )  # alive until the backward pass
    note_call(ctx, ctx.context.exchange, x)


def _backward_halo(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
    operands = (grad, ctx.dim, ctx.before, ctx.after, ctx.slots, ctx.context.handle)
    dx = run_gradient(ctx.context.mesh, has_run_again(ctx), halo_backward_op, *operands)
    return dx, None, None, None, None


def _setup_halo_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.dim, ctx.before, ctx.after, _, handle = inputs
    ctx.context = get_object(handle, ScanContext)
    ctx.call = get_forward_call(ctx.context.exchange)


def _backward_halo_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    operands = (grad, ctx.dim, ctx.before, ctx.after, ctx.context.handle)  # a halo is linear
    return run_gradient(ctx.context.mesh, ctx.call, halo_op, *operands), None, None, None, None, None


halo_op.register_autograd(_backward_halo, setup_context=_setup_halo)
halo_backward_op.register_autograd(_backward_halo_backward, setup_context=_setup_halo_backward)
