"""Call PyTorch's flash attention for CPU tile by tile, forward and backward: the CPU kernel.

Why this and not FlexAttention: torch 2.13 has no FlexAttention backward on the CPU and no lse when it is
compiled there. The aten operators take strided views (so a tile is never copied), grouped K/V heads and
unequal lengths, return the natural-log lse, and their backward is exact per tile when it is given the
global out and lse. Low-precision inputs are computed in float32: the bf16 backward runs at a tenth of
the speed.

The operators read the last dimension as if its stride were 1, so tensors with another stride are copied
first.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import TypeAlias

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.functional import pad

from ds_ring.errors import RingConfigError
from ds_ring.masks.tiles import Kind, Tiles
from ds_ring.runtime.kernels.calls import Sizes, calls
from ds_ring.runtime.kernels.interface import Inside, PartialGrads, PartialOut, Rows, Tile
from ds_ring.schedule.workspace import BIASED, BLOCK, TRIANGLE

SMALL_BIAS = 256  # side of the squares of log m that several of are kept: 256 KiB each
Mode: TypeAlias = "FakeTensorMode | None"  # tensors that are kept belong to one; None for real ones
HIDDEN = -1e30  # additive bias of a pair that is not attended; -inf would return lse 0

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


@lru_cache(maxsize=16)
def _hidden(queries: int, keys: int, kind: Kind, dtype: torch.dtype, mode: Mode) -> Tensor:
    """Return the bias that hides what is not attended in an inverse-causal triangle or a band's strip."""
    hidden = torch.full((queries, keys), HIDDEN, dtype=dtype)
    # Seen are keys j of query i with 0 <= j - i <= keys - queries in a band, with j >= i in a triangle.
    shift = keys - queries if kind == Kind.BI_CAUSAL else keys
    return hidden.tril(min(shift, 0) - 1) + hidden.triu(max(shift, 0) + 1)


# Few: one has BIASED squared elements, 4 MiB in float32.
@lru_cache(maxsize=2)
def _square_of_weights(inside: Inside, dtype: torch.dtype, mode: Mode) -> Tensor:
    return inside.bias(BIASED, BIASED, dtype, torch.device("cpu"))


@lru_cache(maxsize=16)
def _small_square_of_weights(inside: Inside, dtype: torch.dtype, mode: Mode) -> Tensor:
    return inside.bias(SMALL_BIAS, SMALL_BIAS, dtype, torch.device("cpu"))


def _log_weights(inside: Inside, queries: int, keys: int, dtype: torch.dtype, mode: Mode) -> Tensor:
    """Return log m; calls of all sizes with the same first positions share one square of it."""
    most = max(queries, keys)
    if inside.mask is None and most <= BIASED:
        square = _small_square_of_weights if most <= SMALL_BIAS else _square_of_weights
        return square(inside, dtype, mode)[:queries, :keys]
    return inside.bias(queries, keys, dtype, torch.device("cpu"))


def drop_kept() -> None:
    """Free the biases that are kept from call to call; for measuring one rank after another."""
    _hidden.cache_clear()
    _square_of_weights.cache_clear()
    _small_square_of_weights.cache_clear()


def _computable(*tensors: Tensor) -> list[Tensor]:
    """Return float64 and float32 as they are, lower dtypes in float32; with the last dimension dense.

    The aten operators take any strides but for the last dimension, where they read neighbours in memory
    whatever the stride says (it is 0 in the gradient of a sum).
    """
    wide = (x if x.dtype in (torch.float32, torch.float64) else x.float() for x in tensors)
    return [x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous() for x in wide]


def _widened(x: Tensor, width: int) -> Tensor:
    """Return x with zeros behind its head dimension: aten refuses q, k and v of different ones."""
    # Of what one hop computes, never of what travels or is kept.
    return x if x.shape[-1] == width else pad(x, (0, width - x.shape[-1]))


def _bias(call: Tile, q: Tensor) -> Tensor | None:
    """Return what is added to the scores of q, pair by pair; None for nothing."""
    dtype, mode = q.dtype, q.fake_mode if isinstance(q, FakeTensor) else None
    queries, keys, inside = call.q_rows.length, call.k_rows.length, call.inside
    bias = None
    if inside is not None and inside.weights is not None:
        bias = _log_weights(inside, queries, keys, dtype, mode)
    if call.kind in (Kind.INVERSE_CAUSAL, Kind.BI_CAUSAL):
        hidden = _hidden(queries, keys, call.kind, dtype, mode)
        return hidden if bias is None else bias + hidden
    if call.kind == Kind.PARTIAL:
        assert inside is not None
        # Not kept from call to call: it depends on this tile's positions, maybe on sample and head.
        visible = inside.visible(len(q), queries, keys, torch.device("cpu"))
        bias = torch.zeros(visible.shape, dtype=dtype) if bias is None else bias
        return bias.masked_fill(~visible, HIDDEN)
    return bias


def _positive(q: Tensor, scale: float) -> tuple[Tensor, float, int]:
    """Return queries with the same scores at a scale above 0, and the factor of their gradient.

    The aten operator returns NaN for a scale of 0 or below: it takes the maximum before it scales.
    """
    if scale > 0:
        return q, scale, 1
    return (-q, -scale, -1) if scale < 0 else (q * 0, 1.0, 0)


def _empty_rows(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Set rows that saw hidden keys only to out 0, lse -inf."""
    # With hidden keys alone the lse is about HIDDEN, far below that of any row with a real key.
    empty = lse < HIDDEN / 10
    return out.masked_fill(empty.unsqueeze(-1), 0), lse.masked_fill(empty, float("-inf"))


def _batch(rows: Rows, x: Tensor) -> Tensor:
    """Return repetitions as a batch: [B * repeats, heads, length, ...]; a view where B or repeats is 1."""
    return rows.of(x) if rows.repeats == 1 else rows.of(x).flatten(0, 1)


def _unbatch(rows: Rows, x: Tensor) -> Tensor:
    """Return the shape of `rows.of`."""
    return x if rows.repeats == 1 else x.unflatten(0, (-1, rows.repeats))


class CpuKernel:
    """Call aten flash attention for CPU over strided views.

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
        if triangle > block:
            raise RingConfigError(
                f'kernel_options of kernel "cpu": triangle: expected at most block {block}, got {triangle};'
                " raise block as well"
            )
        self._forward = Sizes(block, triangle)
        self._backward = Sizes(block, triangle, backward=True)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, scale: float) -> Iterator[PartialOut]:
        width = v.shape[-1]
        q, k, v = (_widened(x, max(q.shape[-1], width)) for x in _computable(q, k, v))
        q, scale, _ = _positive(q, scale)
        group = q.shape[1] // k.shape[1]
        for call in calls(tiles, self._forward):
            heads, rows, keys = call.heads(group), call.q_rows, call.k_rows
            out, lse = _forward(
                _batch(rows, q[:, heads]),
                _batch(keys, k),
                _batch(keys, v),
                0.0,
                call.kind == Kind.CAUSAL,
                attn_mask=_bias(call, q),
                scale=scale,
            )
            # The same number added to every score of a call moves its lse and leaves its out as it is.
            lse = lse + call.bias if call.bias else lse
            # In every other kind of tile each row sees a key.
            if call.kind == Kind.PARTIAL:
                out, lse = _empty_rows(out, lse)
            yield PartialOut(heads, rows, _unbatch(rows, out)[..., :width], _unbatch(rows, lse))
            del out, lse  # or they would live on while the next ones are computed

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tiles: Tiles,
        scale: float, grad_lse: Tensor | None = None,
    ) -> Iterator[PartialGrads]:  # fmt: skip
        width, v_width = q.shape[-1], v.shape[-1]
        grad_out, q, k, v, out = _computable(grad_out, q, k, v, out)
        if grad_lse is not None:  # a value of 1 whose gradient is that of the lse; `out` gets a 0 there
            grad_out = torch.cat([grad_out, grad_lse.to(grad_out.dtype).unsqueeze(-1)], dim=-1)
            v = pad(v, (0, 1), value=1.0)
        most = max(width, v.shape[-1])
        grad_out, q, k, v, out = (_widened(x, most) for x in (grad_out, q, k, v, out))
        q, scale, sign = _positive(q, scale)
        group = q.shape[1] // k.shape[1]
        for call in calls(tiles, self._backward):
            heads, rows, keys = call.heads(group), call.q_rows, call.k_rows
            lse_t = _batch(rows, lse[:, heads])
            if call.kind == Kind.PARTIAL:  # exp(hidden - 0) is 0, as the row's weights must be
                lse_t = lse_t.masked_fill(lse_t == float("-inf"), 0)
            dq, dk, dv = _backward(
                _batch(rows, grad_out[:, heads]),
                _batch(rows, q[:, heads]),
                _batch(keys, k),
                _batch(keys, v),
                _batch(rows, out[:, heads]),
                # exp(score + bias - lse) without a bias tensor.
                lse_t - call.bias if call.bias else lse_t,
                0.0,
                call.kind == Kind.CAUSAL,
                attn_mask=_bias(call, q),
                scale=scale,
            )
            dq = dq if sign == 1 else dq * sign
            dq, dk, dv = _unbatch(rows, dq), _unbatch(keys, dk), _unbatch(keys, dv)
            yield PartialGrads(heads, rows, keys, dq[..., :width], dk[..., :width], dv[..., :v_width])
            del dq, dk, dv

    def of_heads(self, heads: slice) -> CpuKernel:
        return self

    def executed_pairs(self, tiles: Tiles, backward: bool = False) -> int:
        return sum(
            call.q_rows.repeats * call.q_rows.length * call.k_rows.length
            for call in calls(tiles, self._backward if backward else self._forward)
        )
