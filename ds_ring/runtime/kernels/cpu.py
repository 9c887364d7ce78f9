"""The CPU kernel: call PyTorch's flash attention for CPU tile by tile, forward and backward.

It does not use FlexAttention, because torch 2.13 has no FlexAttention backward on the CPU and returns no lse
from it when it is compiled there. The aten operators take strided views (so a tile is never copied), grouped
K/V heads and unequal lengths, and return the natural-log lse. Their backward is exact per tile if it is given
the global out and lse. Inputs of lower precision are computed in float32: the bf16 backward is ten times
slower.

Terms: m is the number of a pattern's branches that contain a (query, key) pair; log m is added to its score.

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

SMALL_BIAS = 256  # side of a log m bias small enough to cache several of them: 256 KiB each in float32
Mode: TypeAlias = "FakeTensorMode | None"  # cached tensors belong to one mode; None for real tensors
HIDDEN = -1e30  # additive bias of a masked pair; with -inf aten would return lse 0

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


@lru_cache(maxsize=16)
def _hidden(queries: int, keys: int, kind: Kind, dtype: torch.dtype, mode: Mode) -> Tensor:
    """Return the bias that masks the other pairs of an inverse-causal triangle or of a strip of a band."""
    hidden = torch.full((queries, keys), HIDDEN, dtype=dtype)
    # Query i attends to key j if 0 <= j - i <= keys - queries in a band, and if j >= i in a triangle.
    shift = keys - queries if kind == Kind.BI_CAUSAL else keys
    return hidden.tril(min(shift, 0) - 1) + hidden.triu(max(shift, 0) + 1)


# Cache only two: each has BIASED squared elements, 4 MiB in float32.
@lru_cache(maxsize=2)
def _square_of_weights(inside: Inside, dtype: torch.dtype, mode: Mode) -> Tensor:
    return inside.bias(BIASED, BIASED, dtype, torch.device("cpu"))


@lru_cache(maxsize=16)
def _small_square_of_weights(inside: Inside, dtype: torch.dtype, mode: Mode) -> Tensor:
    return inside.bias(SMALL_BIAS, SMALL_BIAS, dtype, torch.device("cpu"))


def _log_weights(inside: Inside, queries: int, keys: int, dtype: torch.dtype, mode: Mode) -> Tensor:
    """Return log m of each pair; calls of any size with the same first positions share one cached square."""
    most = max(queries, keys)
    if inside.mask is None and most <= BIASED:
        square = _small_square_of_weights if most <= SMALL_BIAS else _square_of_weights
        return square(inside, dtype, mode)[:queries, :keys]
    return inside.bias(queries, keys, dtype, torch.device("cpu"))


def drop_kept() -> None:
    """Free the biases that are cached across calls; for measuring one rank after another."""
    _hidden.cache_clear()
    _square_of_weights.cache_clear()
    _small_square_of_weights.cache_clear()


def _computable(*tensors: Tensor) -> list[Tensor]:
    """Return float64 and float32 unchanged, lower dtypes in float32, all with a dense last dimension.

    The aten operators accept any stride except in the last dimension: there they read neighbours in memory
    whatever the stride says (it is 0 in the gradient of a sum).
    """
    wide = (x if x.dtype in (torch.float32, torch.float64) else x.float() for x in tensors)
    return [x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous() for x in wide]


def _widened(x: Tensor, width: int) -> Tensor:
    """Return x padded with zeros in the head dimension: aten requires the same one for q, k and v."""
    # Only the operands of one hop are padded, never a tensor that travels or is kept.
    return x if x.shape[-1] == width else pad(x, (0, width - x.shape[-1]))


def _bias(call: Tile, q: Tensor) -> Tensor | None:
    """Return the bias that is added to each score of q; None if there is none."""
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
        # Not cached: it depends on this tile's positions, and may depend on the sample and the head.
        visible = inside.visible(len(q), queries, keys, torch.device("cpu"))
        bias = torch.zeros(visible.shape, dtype=dtype) if bias is None else bias
        return bias.masked_fill(~visible, HIDDEN)
    return bias


def _positive(q: Tensor, scale: float) -> tuple[Tensor, float, int]:
    """Return queries and a positive scale with the same scores, and the factor of the queries' gradient.

    The aten operator returns NaN for a scale of 0 or below: it takes the maximum before it scales.
    """
    if scale > 0:
        return q, scale, 1
    return (-q, -scale, -1) if scale < 0 else (q * 0, 1.0, 0)


def _empty_rows(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Set rows whose keys are all masked to out 0, lse -inf."""
    # If all keys are masked, the lse is about HIDDEN, far below that of any row with a real key.
    empty = lse < HIDDEN / 10
    return out.masked_fill(empty.unsqueeze(-1), 0), lse.masked_fill(empty, float("-inf"))


def _batch(rows: Rows, x: Tensor) -> Tensor:
    """Move repetitions into the batch: [B * repeats, heads, length, ...]; a view if B or repeats is 1."""
    return rows.of(x) if rows.repeats == 1 else rows.of(x).flatten(0, 1)


def _unbatch(rows: Rows, x: Tensor) -> Tensor:
    """Undo `_batch`: return x in the shape of `rows.of`."""
    return x if rows.repeats == 1 else x.unflatten(0, (-1, rows.repeats))


class CpuKernel:
    """Call aten flash attention for CPU over strided views.

    Args:
        block: maximum number of queries and of keys in one call.
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
            # The same number added to every score of a call changes its lse and not its out.
            lse = lse + call.bias if call.bias else lse
            # Only in a PARTIAL tile can a row have no key.
            if call.kind == Kind.PARTIAL:
                out, lse = _empty_rows(out, lse)
            yield PartialOut(heads, rows, _unbatch(rows, out)[..., :width], _unbatch(rows, lse))
            del out, lse  # else they stay alive while the next ones are computed

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tiles: Tiles,
        scale: float, grad_lse: Tensor | None = None,
    ) -> Iterator[PartialGrads]:  # fmt: skip
        width, v_width = q.shape[-1], v.shape[-1]
        grad_out, q, k, v, out = _computable(grad_out, q, k, v, out)
        if grad_lse is not None:  # append a column of ones to v: its gradient is the one of the lse
            grad_out = torch.cat([grad_out, grad_lse.to(grad_out.dtype).unsqueeze(-1)], dim=-1)
            v = pad(v, (0, 1), value=1.0)
        most = max(width, v.shape[-1])
        grad_out, q, k, v, out = (_widened(x, most) for x in (grad_out, q, k, v, out))
        q, scale, sign = _positive(q, scale)
        group = q.shape[1] // k.shape[1]
        for call in calls(tiles, self._backward):
            heads, rows, keys = call.heads(group), call.q_rows, call.k_rows
            lse_t = _batch(rows, lse[:, heads])
            if call.kind == Kind.PARTIAL:  # then exp(HIDDEN - 0) is 0: the row has no attention weights
                lse_t = lse_t.masked_fill(lse_t == float("-inf"), 0)
            dq, dk, dv = _backward(
                _batch(rows, grad_out[:, heads]),
                _batch(rows, q[:, heads]),
                _batch(keys, k),
                _batch(keys, v),
                _batch(rows, out[:, heads]),
                # exp(score + bias - lse), without a bias tensor
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
