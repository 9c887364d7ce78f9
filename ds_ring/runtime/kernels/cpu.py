"""The CPU kernel: PyTorch's flash attention for CPU, forward and backward, called tile by tile.

Why this and not FlexAttention: torch 2.13 has no FlexAttention backward on the CPU and no lse when it is
compiled there. The aten operators take strided views (so a tile is never copied), grouped K/V heads and
unequal lengths, return the natural-log lse, and their backward is exact per tile when it is given the
global out and lse. Low-precision inputs are computed in float32: the bf16 backward runs at a tenth of
the speed.

[Note: small triangles]
`is_causal` skips work only in steps of 512 keys, so a triangle is halved until its side is at most
`TRIANGLE`: two triangles and one full square each time. What is computed beyond the triangle is then
TRIANGLE / side of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ds_ring.errors import RingConfigError
from ds_ring.runtime.kernels.interface import PartialGrads, PartialOut
from ds_ring.runtime.kernels.reference import tile_slices
from ds_ring.schedule.tiles import Kind, Tiles

TRIANGLE = 256  # side of the smallest triangle, tokens
BLOCK = 2048  # most queries and most keys of one call: bounds the workspace
HIDDEN = -1e30  # additive bias of a pair that is not attended; -inf would return lse 0

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


class Leaf(NamedTuple):
    """One call of the aten operator."""

    q_slots: slice
    k_slots: slice
    kind: Kind


def _part(slots: slice, first: int, end: int) -> slice:
    """Members first .. end-1 of an arithmetic progression of slots."""
    return slice(slots.start + first * slots.step, slots.start + (end - 1) * slots.step + 1, slots.step)


def _length(slots: slice) -> int:
    return len(range(slots.start, slots.stop, slots.step))


def _parts(slots: slice, block: int) -> list[slice]:
    """A progression cut into consecutive parts of at most `block` members, of nearly equal length."""
    length = _length(slots)
    count = -(-length // block)
    bounds = [length * part // count for part in range(count + 1)]
    return [_part(slots, first, end) for first, end in itertools.pairwise(bounds)]


def _split(q_slots: slice, k_slots: slice, kind: Kind, block: int, triangle: int) -> Iterator[Leaf]:
    """Cut a tile into calls; see [Note: small triangles]."""
    rows, keys = _length(q_slots), _length(k_slots)
    if kind == Kind.FULL:
        for q_part, k_part in itertools.product(_parts(q_slots, block), _parts(k_slots, block)):
            yield Leaf(q_part, k_part, kind)
    elif rows <= triangle:
        yield Leaf(q_slots, k_slots, kind)
    else:
        half = -(-rows // 2 // triangle) * triangle  # multiples of it, so that leaves are of one size
        low_q, high_q = _part(q_slots, 0, half), _part(q_slots, half, rows)
        low_k, high_k = _part(k_slots, 0, half), _part(k_slots, half, keys)
        yield from _split(low_q, low_k, kind, block, triangle)
        full = (high_q, low_k) if kind == Kind.CAUSAL else (low_q, high_k)
        yield from _split(*full, Kind.FULL, block, triangle)
        yield from _split(high_q, high_k, kind, block, triangle)


@lru_cache(maxsize=512)
def leaves(tiles: Tiles, block: int = BLOCK, triangle: int = TRIANGLE) -> tuple[Leaf, ...]:
    """All calls for a table of tiles (the same object gives the same answer at once)."""
    return tuple(leaf for tile in tile_slices(tiles) for leaf in _split(*tile, block, triangle))


@lru_cache(maxsize=16)
def _hidden_below(side: int, dtype: torch.dtype) -> Tensor:
    """The additive bias of an anticausal triangle: pairs with j < i are hidden."""
    return torch.full((side, side), HIDDEN, dtype=dtype).tril_(-1)


def _computable(*tensors: Tensor) -> list[Tensor]:
    """float64 and float32 as they are, anything lower in float32."""
    return [x if x.dtype in (torch.float32, torch.float64) else x.float() for x in tensors]


def _bias(leaf: Leaf, dtype: torch.dtype) -> Tensor | None:
    if leaf.kind != Kind.ANTICAUSAL:
        assert leaf.kind in (Kind.FULL, Kind.CAUSAL), f"cpu kernel: a tile of kind {leaf.kind!r}"
        return None
    return _hidden_below(_length(leaf.q_slots), dtype)


class CpuKernel:
    """aten flash attention for CPU over strided views.

    Args:
        block: most queries and most keys of one call.
        triangle: side of the smallest triangle; [Note: small triangles].
    """

    name = "cpu"

    def __init__(self, block: int = BLOCK, triangle: int = TRIANGLE) -> None:
        for option, tokens in (("block", block), ("triangle", triangle)):
            if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1:
                raise RingConfigError(
                    f'kernel_options of kernel "cpu": {option}: expected a number of tokens of at least 1,'
                    f" got {tokens!r}; leave it out for the default"
                )
        self.block, self.triangle = block, triangle

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, scale: float) -> Iterator[PartialOut]:
        q, k, v = _computable(q, k, v)
        for leaf in leaves(tiles, self.block, self.triangle):
            # Kept by no name here, or it would live on while the next one is computed.
            yield PartialOut(
                leaf.q_slots,
                *_forward(
                    q[:, :, leaf.q_slots],
                    k[:, :, leaf.k_slots],
                    v[:, :, leaf.k_slots],
                    0.0,
                    leaf.kind == Kind.CAUSAL,
                    attn_mask=_bias(leaf, q.dtype),
                    scale=scale,
                ),
            )

    def backward(
        self,
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        tiles: Tiles,
        scale: float,
    ) -> Iterator[PartialGrads]:
        grad_out, q, k, v, out = _computable(grad_out, q, k, v, out)
        for leaf in leaves(tiles, self.block, self.triangle):
            rows, keys = leaf.q_slots, leaf.k_slots
            yield PartialGrads(
                rows,
                keys,
                *_backward(
                    grad_out[:, :, rows],
                    q[:, :, rows],
                    k[:, :, keys],
                    v[:, :, keys],
                    out[:, :, rows],
                    lse[:, :, rows],
                    0.0,
                    leaf.kind == Kind.CAUSAL,
                    attn_mask=_bias(leaf, q.dtype),
                    scale=scale,
                ),
            )

    def executed_pairs(self, tiles: Tiles) -> int:
        return sum(
            _length(leaf.q_slots) * _length(leaf.k_slots) for leaf in leaves(tiles, self.block, self.triangle)
        )
