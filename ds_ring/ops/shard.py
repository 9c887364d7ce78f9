"""Turn tensors into shards and back.

Owns the permutation of a layout applied to a tensor, and nothing of attention.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor

from ds_ring.comm.collective import collective
from ds_ring.comm.device_tables import leave_inference_mode, to_device
from ds_ring.comm.mesh import RingMesh, check_mesh
from ds_ring.comm.streams import is_fake
from ds_ring.errors import RingConfigError, RingLayoutError, RingShapeError, shown
from ds_ring.ops.bits import check_copied, fill_bits, view_as_bits, view_from_bits
from ds_ring.ops.checks import check_layout, check_not_transformed, check_operand, shards
from ds_ring.ops.context import RingContext
from ds_ring.ops.eager import run_compared
from ds_ring.ops.layer_gradients import compare_gradient, has_run_again, note_call
from ds_ring.ops.passes import get_forward_call
from ds_ring.ops.tracing import forbid_tracing
from ds_ring.schedule.layout import Layout


# [Note: shards that are known]
# Attention by another layout than that of the shards is wrong, and no shape tells. Tensors that
# `shard_sequence` returned are known by their id, which a pass looks up without a call of Python; what is
# computed from them is not known.
class Shard(NamedTuple):
    """Hold what a tensor was cut by."""

    tensor: weakref.ref[Tensor]
    layout: Layout


def _note_shard(local: Tensor, layout: Layout) -> None:
    key = id(local)
    shards[key] = Shard(weakref.ref(local, lambda _: shards.pop(key, None)), layout)


def check_shards(context: RingContext, names: tuple[str, ...], operands: Sequence[Tensor | None]) -> None:
    """Refuse operands that `shard_sequence` cut by a layout of other positions than the pass's.

    Raises:
        RingLayoutError: another layout, or its name, which stands for a length that the ranks divide.
    """
    mesh = context.mesh
    for name, x in zip(names, operands, strict=True):
        shard: Shard | None = shards.get(id(x))
        if x is None or shard is None or shard.tensor() is not x or x.dim() != 4:
            continue
        tokens = x.shape[2] * mesh.ulysses_size
        layout = context.layout_for(tokens, x.device.type)
        if not layout.is_one_sequence or shard.layout == layout or tokens != layout.local_tokens:
            continue
        if not np.array_equal(shard.layout.positions(mesh.ring_rank), layout.positions(mesh.ring_rank)):
            raise RingLayoutError.wrong(
                name, f"a shard of the layout of the call, {layout}", f"one of {shard.layout}",
                "pass layout=, that of shard_sequence: a name, or none, means a length that the ranks divide",
            )  # fmt: skip


@forbid_tracing
def shard_sequence(
    x_global: Tensor,
    layout: Layout,
    *,
    dim: int,
    ring_rank: int | None = None,
    mesh: RingMesh | None = None,
    pad_value: float = 0,
) -> Tensor:
    """Return this rank's tokens of a tensor that every rank holds whole. Differentiable.

    Args:
        x_global: any tensor with layout.tokens entries in `dim`.
        layout: the rank and slot of each token.
        dim: the token dimension.
        ring_rank: whose shard; or give `mesh`, which also cuts it for the Ulysses ranks.
        mesh: this process's place.
        pad_value: what padding slots get, a value of the tensor's dtype.

    Returns:
        The same shape with layout.local_tokens (over the Ulysses size) entries in `dim`, contiguous.

    Raises:
        RingShapeError: wrong length, neither or both of ring_rank and mesh, a pad_value that the dtype has
            not, or a gradient of a dtype that torch does not add up.
        RingLayoutError: the layout is for another ring than the mesh's.
    """
    if (ring_rank is None) == (mesh is None):
        got = "neither" if mesh is None else "both"
        advice = "give exactly one of ring_rank=... and mesh=..."
        raise RingShapeError.wrong("shard_sequence", "one of the two", got, advice)
    if mesh is not None:
        check_mesh(mesh)
    _check("shard_sequence", x_global, layout, dim, mesh, whole=True)
    if isinstance(pad_value, bool) or not isinstance(pad_value, (int, float)):
        raise RingShapeError.wrong("shard_sequence: pad_value", "a number", shown(pad_value), "use 0")
    rank = mesh.ring_rank if mesh is not None else ring_rank
    if isinstance(rank, bool) or not isinstance(rank, (int, np.integer)) or not 0 <= rank < layout.ring_size:
        expected = f"a rank of the layout, 0..{layout.ring_size - 1}"
        raise RingShapeError.wrong("shard_sequence: ring_rank", expected, shown(rank), "pass one of them")
    pad_bits = fill_bits("shard_sequence: pad_value", pad_value, x_global)
    check_copied("shard_sequence", x_global)
    positions = _find_positions(layout, int(rank), *_cut(layout, mesh))
    index = positions.clamp_min(0).to(x_global.device)  # padding slots (-1) take token 0 until pad_value
    local = view_as_bits(x_global).index_select(dim, index)
    if bool((positions < 0).any()):
        shape = [1] * local.dim()
        shape[dim] = -1
        local = local.masked_fill((positions < 0).to(local.device).view(shape), pad_bits)
    shard = view_from_bits(local, x_global.dtype)
    if shard.is_floating_point() and not is_fake(shard):
        _note_shard(shard, layout)
    return shard


def _check(name: str, x: object, layout: object, dim: object, mesh: RingMesh | None, whole: bool) -> None:
    """Raise RingShapeError or RingLayoutError for arguments that do not fit each other."""
    check_operand(f"{name}: the tensor", x)
    check_layout(layout, None if mesh is None else mesh.ring_size)
    assert isinstance(x, Tensor) and isinstance(layout, Layout)
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise RingShapeError.wrong(f"{name}: dim", "the number of a dimension", shown(dim), "pass an int")
    first, end = (0, layout.tokens) if whole else _cut(layout, mesh)
    size = x.shape[dim] if -x.dim() <= dim < x.dim() else 0
    if size != end - first:
        expected = f"{end} tokens (the layout's)" if whole else f"{end - first} slots (the layout's shard)"
        advice = "build the layout for this length" if whole else "pass this rank's shard and its layout"
        raise RingShapeError.wrong(name, expected, f"{size} in dim {dim} of shape {tuple(x.shape)}", advice)


def _cut(layout: Layout, mesh: RingMesh | None) -> tuple[int, int]:
    """Return first slot and end of the part of a shard that this Ulysses rank holds."""
    if mesh is None or mesh.ulysses_size == 1:
        return 0, layout.local_tokens
    part = layout.part_slots(mesh.ulysses_size)
    return mesh.ulysses_rank * part, (mesh.ulysses_rank + 1) * part


@lru_cache(maxsize=64)
@leave_inference_mode
def _find_positions(layout: Layout, ring_rank: int, first: int, end: int) -> Tensor:
    return torch.from_numpy(layout.positions(ring_rank)[first:end].copy())


@lru_cache(maxsize=16)
@leave_inference_mode
def _find_slots(layout: Layout) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(layout.slots_by_position()))


class _AllGather(torch.autograd.Function):
    """Concatenate shards along dim 0; the gradient is the sum of all ranks' gradients for this shard, over
    `losses`.
    """

    @staticmethod
    def forward(ctx: Any, local: Tensor, call: collective, losses: int = 1) -> Tensor:
        ctx.mesh, ctx.losses = call.mesh, losses
        mesh = call.mesh
        note_call(ctx, call.exchange, local)
        return torch.cat(call.exchange.all_gather(local, mesh.sequence_group, mesh.sequence_size))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        gradient: Tensor = _ReduceScatter.apply(grads[0], ctx.mesh, has_run_again(ctx))
        return gradient if ctx.losses == 1 else gradient / ctx.losses, None, None


class _ReduceScatter(torch.autograd.Function):
    """Return this rank's part of the sum of all ranks' tensors; the gradient is the concatenation."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, mesh: RingMesh, number: int) -> Tensor:
        ctx.mesh = mesh
        with (
            collective(mesh, "gather_sequence backward", alone=is_fake(whole)) as call,
            compare_gradient(mesh, number),
        ):
            if is_legacy_batchedtensor(whole):
                got, advice = "several (is_grads_batched=True)", "call torch.autograd.grad for each of them"
                raise RingConfigError.wrong("gather_sequence", "one gradient at a time", got, advice)
            call.agree({"shape": tuple(whole.shape), "dtype": whole.dtype})
            ctx.call = get_forward_call(call.exchange)
            return call.exchange.reduce_scatter(whole.chunk(mesh.sequence_size), mesh.sequence_group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        grad, mesh = grads[0].contiguous(), ctx.mesh
        with (
            collective(mesh, "gather_sequence second derivative", alone=is_fake(grad)) as call,
            compare_gradient(mesh, ctx.call),
        ):
            call.agree({"shape": tuple(grad.shape), "dtype": grad.dtype})
            gradient: Tensor = _AllGather.apply(grad, call)
        return gradient, None, None


@forbid_tracing
def gather_sequence(
    x_local: Tensor, layout: Layout, *, mesh: RingMesh, dim: int, same_loss: bool = False
) -> Tensor:
    """Return the whole tensor on every rank, in the order of positions, padding stripped. Differentiable.

    Args:
        x_local: this rank's shard.
        layout: of the sequence.
        mesh: of the ring.
        dim: of the tokens.
        same_loss: every rank computes the same loss from the whole tensor, and the gradient is that of this
            loss. By default it is that of the sum of all ranks' losses (as in torch.distributed.nn):
            mesh.sequence_size times as large where all compute the same one.

    Raises:
        RingShapeError: `dim` has not layout.local_tokens (over the Ulysses size) entries, or a gradient of a
            dtype that torch does not add up.
        RingLayoutError: the layout is for another ring than the mesh's.
        RingMismatchError: the ranks call with different shapes, dtypes or layouts, or one was refused.
    """
    check_mesh(mesh)
    with collective(mesh, "gather_sequence", alone=is_fake(x_local)) as call:
        check_not_transformed("gather_sequence")
        _check("gather_sequence", x_local, layout, dim, mesh, whole=False)
        check_copied("gather_sequence", x_local)
        shape = tuple(x_local.shape)
        # Tokens first: shards are joined along dim 0, and contiguous as messages must be. What is sent is
        # memory, which has not the sign of a lazy conjugate.
        rows = view_as_bits(x_local).movedim(dim, 0).resolve_conj().resolve_neg().contiguous()
        fields = {"layout": layout, "shape": shape, "dim": dim % len(shape), "dtype": x_local.dtype}
        run_compared(mesh, "gather_sequence", lambda x: call.agree(fields), x_local)
        whole = _AllGather.apply(rows, call, mesh.sequence_size if same_loss else 1)
    # The index has the slot of each position, and padding slots have none: they fall away.
    index = to_device(_find_slots(layout), x_local.device)
    return view_from_bits(whole.index_select(0, index).movedim(0, dim), x_local.dtype)
