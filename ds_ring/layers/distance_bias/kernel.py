"""A bias of content and distance: one hop of attention whose scores have a learned term for each distance.

A query has relative states r. The score of a key at distance d has the term r W[:, d - f] for f <= d < f + R.
Profiles W are shared by all heads (Inkling, f = 0), or each head has its own (XLNet's keys of distances; Shaw
et al. 2018, arXiv 1803.02155). Keys after the query are at distances below 0.
The states travel nowhere: they are the last dimensions of the local queries. No bias [S, T] exists, since the
kernel computes a block of queries at a time: [block, R] terms, of which each pair takes one.

Shapes: H query heads, Q queries of a block, K keys that it reads, D head dim, N width of r, R distances. W is
[N, R] or [H, N, R].
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import ClassVar

import torch
from torch import Tensor

from ds_ring.errors import RingConfigError, RingShapeError
from ds_ring.kernels.interface import Kernel, Operands, PartialGrads, PartialOut, Tile, each_tile
from ds_ring.kernels.reference import compute_score_gradients, compute_weights
from ds_ring.masks.tiles import Tiles
from ds_ring.ops.context import RingContext
from ds_ring.ops.extra_operand import ExtraOperand
from ds_ring.ring.merge import get_accumulator_dtype
from ds_ring.schedule.plan import Plan

QUERIES = 128  # of a block


class Profiles(ExtraOperand):
    """The profiles W as an operand of a pass whose queries end with relative states.

    Args:
        tensor: W, [N, R] or [H, N, R] of all query heads.
        first: the distance of its first profile.
    """

    name: ClassVar[str] = "profiles"
    allows_other_key_dim: ClassVar[bool] = True  # k is narrower than q

    def __init__(self, tensor: Tensor, first: int = 0) -> None:
        super().__init__(tensor)
        self._first = first

    @property
    def description(self) -> Hashable:
        return super().description, self._first

    def check(self, context: RingContext, operands: Operands, parts: int) -> None:
        q, k, *_ = operands
        profiles = self.tensor
        why = context.options.transport_spec.no_hop_sums
        if why is not None:
            got = f'"{context.options.transport}", which {why}'
            raise RingConfigError.wrong("profiles", 'transport "ring"', got, "change the transport")
        if profiles.dtype != q.dtype or profiles.device != q.device:
            got = f"{profiles.dtype} on {profiles.device}"
            raise RingShapeError.wrong("profiles", f"{q.dtype} on {q.device}, as q", got, "cast them")
        width, heads = q.shape[3] - k.shape[3], q.shape[1] * context.mesh.ulysses_size // parts
        by_head = profiles.shape[:-2]
        if (
            profiles.dim() < 2
            or 0 in profiles.shape
            or profiles.shape[-2] != width
            or by_head not in ((), (heads,))
        ):
            expected = f"[{width}, distances], head_dim {q.shape[3]} of q less {k.shape[3]} of k"
            expected += f", or [{heads}, {width}, distances]"
            advice = "append the relative states to q"
            raise RingShapeError.wrong("profiles", expected, tuple(profiles.shape), advice)

    def fields(self, k: Tensor) -> dict[str, object]:
        return {"head_dim of k": k.shape[-1], self.name: (*self.tensor.shape, self._first)}

    def wrap_kernel(self, kernel: Kernel, context: RingContext, plan: Plan, operands: Operands) -> Kernel:
        return ProfileKernel()

    def bind_operand(self, kernel: Kernel, context: RingContext, operands: Operands) -> ProfileKernel:
        profiles, self._heads = self.tensor, context.heads_here(operands.q)
        if profiles.dim() == 3:
            profiles = profiles[self._heads]
        dtype, backward = get_accumulator_dtype(profiles.dtype), operands.grad_out is not None
        self._kernel = ProfileKernel(
            profiles, torch.zeros_like(profiles, dtype=dtype) if backward else None, self._first
        )
        return self._kernel

    def gradient(self) -> Tensor:
        """Return the gradient after a backward pass: that of this rank's queries, 0 for heads of others."""
        gradient = self._kernel.gradient
        assert gradient is not None, "a forward pass"
        if gradient.dim() == 2:
            return gradient.to(self.tensor.dtype)
        whole = torch.zeros_like(self.tensor)
        whole[self._heads] = gradient.to(whole.dtype)
        return whole


class ProfileKernel:
    """Compute dense scores with their terms, in blocks of queries and at least float32.

    Args:
        profiles: W; None until `Profiles.bound` is called.
        gradient: of W, to which a backward pass adds; None in a forward pass.
        first: the distance of the first profile.
    """

    name = "profiles"

    def __init__(
        self, profiles: Tensor | None = None, gradient: Tensor | None = None, first: int = 0
    ) -> None:
        self._profiles, self.gradient, self._first = profiles, gradient, first

    def select_heads(self, heads: slice) -> ProfileKernel:
        if self._profiles is None or self._profiles.dim() == 2:
            return self
        gradient = None if self.gradient is None else self.gradient[heads]
        return ProfileKernel(self._profiles[heads], gradient, self._first)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, scale: float) -> Iterator[PartialOut]:
        for tile in _blocks(tiles):
            heads = tile.heads(q.shape[1] // k.shape[1])
            scores, _, v_t = self._scores(q[:, heads], k, v, tile, scale, heads)[:3]
            lse = torch.logsumexp(scores, dim=-1)
            yield PartialOut(heads, tile.q_rows, compute_weights(scores, lse) @ v_t, lse)

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tiles: Tiles,
        scale: float, grad_lse: Tensor | None = None,
    ) -> Iterator[PartialGrads]:  # fmt: skip
        assert self._profiles is not None and self.gradient is not None, "a kernel of a forward pass"
        groups, width = k.shape[1], k.shape[3]
        for tile in _blocks(tiles):
            heads = tile.heads(q.shape[1] // groups)
            scores, k_t, v_t, places, is_near = self._scores(q[:, heads], k, v, tile, scale, heads)
            operands = grad_out, q, out, lse, grad_lse
            q_t, grad_t, weights, dscores = compute_score_gradients(tile, heads, scores, v_t, *operands)
            profiles = _select_heads(self._profiles, heads).to(scores.dtype)
            dterms = dscores.new_zeros((*dscores.shape[:-1], profiles.shape[-1]))
            dterms.scatter_add_(-1, places.expand_as(dscores), dscores * is_near)
            gradient, states = _select_heads(self.gradient, heads), q_t[..., width:]
            select_heads = torch.einsum("bhqn,bhqr->hnr", states, dterms).to(gradient.dtype)
            gradient.add_(select_heads if gradient.dim() == 3 else select_heads.sum(0))
            dscores = dscores * scale
            dq = torch.cat([dscores @ k_t, dterms @ profiles.mT], dim=-1)
            of_keys = dscores.mT @ q_t[..., :width], weights.mT @ grad_t
            dk, dv = (x.unflatten(1, (groups, -1)).sum(2) for x in of_keys)
            yield PartialGrads(heads, tile.q_rows, tile.k_rows, dq, dk, dv)

    def count_executed_pairs(self, tiles: Tiles, backward: bool = False) -> int:
        return sum(tile.q_rows.length * tile.k_rows.length for tile in _blocks(tiles))

    def _scores(
        self, q: Tensor, k: Tensor, v: Tensor, tile: Tile, scale: float, heads: slice
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return the masked scores [B, heads, Q, K], k and v of each query head, and where each pair's term
        is among [Q, R], with whether it has one.
        """
        assert self._profiles is not None, "a kernel without profiles"
        dtype, width = torch.promote_types(q.dtype, torch.float32), k.shape[3]
        q_t = tile.q_rows.select(q).to(dtype)
        k_t, v_t = (
            tile.k_rows.select(x).to(dtype).repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v)
        )
        terms = q_t[..., width:] @ _select_heads(self._profiles, heads).to(dtype)
        q_at, k_at = tile.positions(q.device)
        distances = q_at[:, None] - k_at - self._first  # from that of the first profile on
        is_near = (distances >= 0) & (distances < terms.shape[-1])
        places = distances.clamp(0, terms.shape[-1] - 1)
        scores = q_t[..., :width] @ k_t.mT * scale
        scores = scores + terms.gather(-1, places.expand_as(scores)) * is_near + tile.bias
        if tile.inside is not None:
            scores = scores + tile.inside.bias(distances.shape[0], distances.shape[1], dtype, q.device)
        visible = tile.visible(len(q), q.device)
        return scores.masked_fill(~visible, float("-inf")), k_t, v_t, places, is_near


def _select_heads(profiles: Tensor, heads: slice) -> Tensor:
    """Return a view of W, or of its gradient, for some heads."""
    return profiles if profiles.dim() == 2 else profiles[heads]


def _blocks(tiles: Tiles) -> Iterator[Tile]:
    """Yield parts of tiles: at most `QUERIES` queries each, with the keys between the bounds of their band.

    Their positions are those of the part.
    """
    for tile in each_tile(tiles):
        queries, keys = tile.q_rows.length, tile.k_rows.length
        for first in range(0, queries, QUERIES):
            end = min(first + QUERIES, queries)
            k_first, k_end = max(0, first - tile.high), min(keys, end - tile.low)
            if k_first >= k_end:
                continue
            (q_at, q_step), (k_at, k_step) = tile.q_at, tile.k_at
            yield tile.part(first, end - first, k_first, k_end - k_first)._replace(
                q_at=(q_at + first * q_step, q_step), k_at=(k_at + k_first * k_step, k_step)
            )
