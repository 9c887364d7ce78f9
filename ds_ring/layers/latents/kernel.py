"""Expand latents where they arrive: one hop of multi-head latent attention, by any other kernel.

In multi-head latent attention (DeepSeek-AI 2024, "DeepSeek-V2", arXiv 2405.04434, section 2.1) the keys and
values of all heads are linear functions of one latent per token, beside a rotary key that all heads share. So
the ring sends the latent and the rotary key, as K and V of one head. `LatentKernel` makes K and V of some
heads at a time, calls the kernel, and returns gradients of latents. The gradient of the up-projection stays
here: it is a sum over the hops of this rank.

Shapes: H query heads, n keys, L latent, N and R parts of a query's head_dim D without and with rotary
embedding, E head_dim of values.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from typing import ClassVar

import torch
from torch import Tensor

from ds_ring.errors import RingConfigError, RingPatternError, RingShapeError
from ds_ring.kernels.interface import (
    ALL_HEADS,
    Kernel,
    Operands,
    PartialGrads,
    PartialOut,
    PassHeads,
    Rows,
    compiles,
)
from ds_ring.masks.pattern import BoundPattern, Pattern
from ds_ring.masks.tiles import Tiles
from ds_ring.ops.context import RingContext
from ds_ring.ops.extra_operand import ExtraOperand
from ds_ring.ring.merge import get_accumulator_dtype
from ds_ring.schedule.lowering import split_heads
from ds_ring.schedule.plan import Plan

NO_ROWS = Rows(0, 1, 0)


def check_same_for_heads(bound: Pattern, pattern: Pattern) -> None:
    """Raise RingPatternError for a pattern that differs between query heads, which all read one latent.

    `bound` is that of a plan, for the heads of this Ulysses rank.
    """
    assert isinstance(bound, BoundPattern), "plans bind their patterns"
    if not bound.is_same_for_heads:
        raise RingPatternError.wrong(
            "up_projection", "a pattern that is the same for all heads", f"{pattern}", "pass expanded k and v"
        )


def latent_value_dim(q: Tensor, rope: Tensor, up: Tensor, query_heads: int) -> int:
    """Return E of an up-projection [H * (N + E), L], given all H query heads."""
    return up.shape[0] // query_heads - (q.shape[-1] - rope.shape[-1])


def check_one_head(latent: Tensor, rope: Tensor) -> None:
    """Raise RingShapeError for latents or rotary keys that are not [B, 1, S, width]."""
    for name, x, width in (("latent", latent, "L"), ("rope", rope, "R")):
        if x.dim() != 4 or x.shape[1] != 1:
            # no sizes: in a traced call they may be symbols, which are no constant text
            got = "several heads" if x.dim() == 4 else f"{x.dim()} dimensions"
            raise RingShapeError(
                f"{name}: expected [batch, 1, tokens, {width}], got {got}; pass what all heads share"
            )


def check_transport(context: RingContext) -> None:
    """Raise RingConfigError for a transport that takes no latents."""
    why = context.options.transport_spec.no_hop_sums
    if why is not None:
        raise RingConfigError(
            f'latents: expected transport "ring", got "{context.options.transport}", which {why}; change the'
            " transport, or expand k and v"
        )


def check_up_projection(up: Tensor, q: Tensor, latent: Tensor, rope: Tensor, query_heads: int) -> None:
    """Raise RingShapeError for an up-projection that does not make keys and values of latents.

    Args:
        up: [H * (N + E), L].
        q, latent, rope: [B, H, S, N + R], [B, 1, S, L] and [B, 1, S, R], checked as tensors before.
        query_heads: H, those of all Ulysses ranks.
    """
    if up.dtype != q.dtype or up.device != q.device:
        raise RingShapeError.wrong(
            "up_projection", f"{q.dtype} on {q.device}, as q", f"{up.dtype} on {up.device}", "cast it"
        )
    nope = q.shape[3] - rope.shape[3]
    if nope < 0:
        raise RingShapeError.wrong(
            "rope", f"at most q's head_dim {q.shape[3]}", rope.shape[3], "give q a rotary part"
        )
    fits = up.dim() == 2 and up.shape[1] == latent.shape[3]
    if not fits or up.shape[0] % query_heads or up.shape[0] // query_heads <= nope:
        raise RingShapeError(
            f"up_projection: expected shape (H * (N + E), L) with H = {query_heads} query heads, N = {nope}"
            f" (head_dim {q.shape[3]} of q less {rope.shape[3]} of the rotary key), E of at least 1 and L ="
            f" {latent.shape[3]} of the latent, got {tuple(up.shape)}; pass kv_b_proj.weight, in which"
            " the N rows of a head for keys stand before its E rows for values"
        )


class UpProjection(ExtraOperand):
    """The up-projection of all heads, [H * (N + E), L], as an operand of a pass over latents."""

    name: ClassVar[str] = "up_projection"
    allows_other_key_dim: ClassVar[bool] = True

    def check(self, context: RingContext, operands: Operands, parts: int) -> None:
        q, k, v, *_ = operands
        check_one_head(k, v)
        check_transport(context)
        check_up_projection(self.tensor, q, k, v, q.shape[1] * context.mesh.ulysses_size // parts)

    def fields(self, k: Tensor) -> dict[str, object]:
        return {"head_dim of k": k.shape[-1], self.name: tuple(self.tensor.shape)}

    def wrap_kernel(self, kernel: Kernel, context: RingContext, plan: Plan, operands: Operands) -> Kernel:
        q, _, v, *_ = operands
        check_same_for_heads(plan.classes[0].pattern, context.pattern)
        value_dim = latent_value_dim(q, v, self.tensor, q.shape[1] * context.mesh.ulysses_size)
        chunk_bytes = context.options.chunk_bytes_on(q.device.type, context.mesh.ring_size)
        return LatentKernel(kernel, value_dim, chunk_bytes)

    def bind_operand(self, kernel: Kernel, context: RingContext, operands: Operands) -> LatentKernel:
        assert isinstance(kernel, LatentKernel), "prepared without the up-projection"
        by_head = self.tensor.unflatten(0, (operands.q.shape[1] * context.mesh.ulysses_size, -1))
        self._heads = context.heads_here(operands.q)
        self._kernel = kernel.for_pass(by_head[self._heads], backward=operands.grad_out is not None)
        return self._kernel

    def gradient(self) -> Tensor:
        """Return the gradient after a backward pass; 0 for the heads of other Ulysses ranks."""
        select_heads = self._kernel.gradient
        assert select_heads is not None, "a forward pass"
        gradient = torch.zeros(self.tensor.shape, dtype=self.tensor.dtype, device=self.tensor.device)
        gradient.unflatten(0, (-1, select_heads.shape[1]))[self._heads].copy_(select_heads)
        return gradient


class LatentKernel:
    """A kernel that gets latents [B, 1, n, L] in place of keys and rotary keys [B, 1, n, R] of values.

    Args:
        kernel: computes the attention of expanded keys and values.
        value_dim: E.
        chunk_bytes: heads are expanded in the smallest groups whose K or V of a shard is at least this large.
        up: [H, N + E, L]; None until `of` is called.
        gradient: [H, N + E, L] in the accumulators' dtype, which `backward` adds to.
    """

    name = "latents"

    def __init__(
        self, kernel: Kernel, value_dim: int, chunk_bytes: int, up: Tensor | None = None,
        gradient: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.kernel, self.value_dim, self.chunk_bytes = kernel, value_dim, chunk_bytes
        self.up, self.gradient = up, gradient
        # of each group of heads, for all hops of a pass: a kernel may keep something from hop to hop
        self._kernels: dict[int, Kernel] = {}

    def for_pass(self, up: Tensor, backward: bool) -> LatentKernel:
        """Return the kernel of a pass with an up-projection [H, N + E, L]."""
        gradient = torch.zeros_like(up, dtype=get_accumulator_dtype(up.dtype)) if backward else None
        return LatentKernel(self.kernel, self.value_dim, self.chunk_bytes, up, gradient)

    def select_heads(self, heads: slice) -> LatentKernel:
        kernel = copy(self)
        kernel.kernel, kernel._kernels = self.kernel.select_heads(heads), {}
        if self.up is not None:
            kernel.up = self.up[heads]
        if self.gradient is not None:
            kernel.gradient = self.gradient[heads]
        return kernel

    def forward(
        self, q: Tensor, latent: Tensor, rope: Tensor, tiles: Tiles, scale: float
    ) -> Iterator[PartialOut]:
        if not len(tiles):
            return
        for heads in self._groups(q):
            k, v = self._expanded(latent, rope, heads)
            for part in self._get_kernel(heads).forward(q[:, heads], k, v, tiles, scale):
                yield part._replace(heads=_among(heads, part.heads, q.shape[1]))

    def backward(
        self, grad_out: Tensor, q: Tensor, latent: Tensor, rope: Tensor, out: Tensor, lse: Tensor,
        tiles: Tiles, scale: float, grad_lse: Tensor | None = None,
    ) -> Iterator[PartialGrads]:  # fmt: skip
        """Yield the gradients of queries tile by tile, and last those of all latents and rotary keys."""
        if not len(tiles):
            return
        dtype = get_accumulator_dtype(q.dtype)
        d_latent, d_rope = (torch.zeros_like(x, dtype=dtype) for x in (latent, rope))
        no_keys, no_queries = (latent[:, :, :0], rope[:, :, :0]), q[:, :, :0]
        nope = q.shape[-1] - rope.shape[-1]
        for heads in self._groups(q):
            k, v = self._expanded(latent, rope, heads)
            # Tokens before heads, as a projection takes them: [B, n, heads, N + E].
            batch, count, slots, _ = k.shape
            expanded = latent.new_zeros((batch, slots, count, nope + self.value_dim), dtype=dtype)
            of_keys, of_values = expanded.transpose(1, 2).split([nope, self.value_dim], dim=-1)
            grad_here, q_here, out_here, lse_here = (x[:, heads] for x in (grad_out, q, out, lse))
            of_lse = None if grad_lse is None else grad_lse[:, heads]
            inputs = (grad_here, q_here, k, v, out_here, lse_here, tiles, scale, of_lse)
            for part in self._get_kernel(heads).backward(*inputs):
                (dq, dk, dv), rows = part.heads_first, part.k_rows
                rows.select(of_keys).add_(dk[..., :nope])
                rows.select(d_rope).add_(dk[..., nope:].sum(-3, keepdim=True))
                rows.select(of_values).add_(dv)
                among = _among(heads, part.heads, q.shape[1])
                yield PartialGrads(among, part.q_rows, NO_ROWS, dq, *no_keys)
                del part, dq, dk, dv
            del k, v
            self._project_back(expanded, latent, heads, d_latent)
        yield PartialGrads(ALL_HEADS, NO_ROWS, Rows(0, 1, latent.shape[2]), no_queries, d_latent, d_rope)

    def count_executed_pairs(self, tiles: Tiles, backward: bool = False) -> int:
        return self.kernel.count_executed_pairs(tiles, backward)

    def compiles(self, operands: Operands, part: PassHeads, scale: float) -> bool:
        """Return whether the kernel is going to compile something for a group of expanded heads."""
        q, _, _, grad_out, has_grad_lse = operands
        first = self._groups(q)[0]
        count = first.stop - first.start
        k = q.new_empty(()).expand(q.shape[0], count, *q.shape[2:])
        v = k[..., :1].expand(*k.shape[:-1], self.value_dim)
        expanded = Operands(q, k, v, grad_out, has_grad_lse)
        return compiles(self.kernel, expanded, [PassHeads(count, count, part.hops)], scale)

    def _groups(self, q: Tensor) -> list[slice]:
        """Return the groups of query heads that are expanded together, by the size of a shard's keys."""
        head_bytes = q.nbytes // q.shape[1] * min(q.shape[-1], self.value_dim) // q.shape[-1]
        return split_heads(slice(0, q.shape[1]), head_bytes, self.chunk_bytes)

    def _get_kernel(self, heads: slice) -> Kernel:
        if heads.start not in self._kernels:
            self._kernels[heads.start] = self.kernel.select_heads(heads)
        return self._kernels[heads.start]

    def _expanded(self, latent: Tensor, rope: Tensor, heads: slice) -> tuple[Tensor, Tensor]:
        """Return k [B, heads, n, N + R] and v [B, heads, n, E]."""
        assert self.up is not None, "a kernel without an up-projection"
        up = self.up[heads]
        with torch.autocast(latent.device.type, enabled=False):  # computed in the dtype of what travels
            both = torch.nn.functional.linear(latent[:, 0], up.flatten(0, 1))
        nope = up.shape[1] - self.value_dim
        of_keys, v = both.unflatten(-1, up.shape[:2]).transpose(1, 2).split([nope, self.value_dim], dim=-1)
        k = latent.new_empty((*of_keys.shape[:-1], nope + rope.shape[-1]))
        k[..., :nope].copy_(of_keys)
        k[..., nope:].copy_(rope.expand(*of_keys.shape[:-1], -1))
        return k, v

    def _project_back(self, expanded: Tensor, latent: Tensor, heads: slice, d_latent: Tensor) -> None:
        """Add what gradients [B, n, heads, N + E] give to those of latents and of the up-projection."""
        assert self.up is not None and self.gradient is not None, "a kernel of a forward pass"
        # in the inputs' dtype, as one process would: as fast as the projection itself
        flat = expanded.flatten(2).to(latent.dtype)
        with torch.autocast(latent.device.type, enabled=False):
            d_latent[:, 0].add_(flat @ self.up[heads].flatten(0, 1))
            of_up = flat.flatten(0, 1).T @ latent[:, 0].flatten(0, 1)
        self.gradient[heads].add_(of_up.view_as(self.gradient[heads]))


def _among(group: slice, part: slice, heads: int) -> slice:
    """Return which of all heads some heads of a group are."""
    if group == slice(0, heads):
        return part
    indices = range(group.start, group.stop)[part]
    return slice(indices.start, indices.stop, indices.step)
