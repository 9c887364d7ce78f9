"""The CPU kernel: call PyTorch's flash attention for CPU tile by tile, forward and backward.

It does not use FlexAttention. On the CPU, FlexAttention of torch 2.13 has no backward, and once compiled it
returns no lse. The aten operators take strided views (so a tile is never copied), grouped K/V heads and
unequal lengths, and return the natural-log lse. Their backward is exact per tile if it is given the global
out and lse. Inputs of lower precision are computed in float32: the bf16 backward is ten times slower.

Terms: m is the number of a pattern's branches that contain a (query, key) pair; log m is added to its score.

The operators read the last dimension as if its stride were 1, so tensors with another stride are copied
first.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.functional import pad

from ds_ring.comm.device_tables import leave_inference_mode
from ds_ring.compat.torch import choose_cpu_flash
from ds_ring.errors import RingConfigError
from ds_ring.kernels.cpu import BIASED, BLOCK, TRIANGLE
from ds_ring.kernels.cpu.calls import Sizes, _prepare_calls, calls
from ds_ring.kernels.interface import PartialGrads, PartialOut, Tile
from ds_ring.masks.tiles import Tiles

if TYPE_CHECKING:
    from ds_ring.kernels.pairs import TilePredicate

SMALL_BIAS = 256  # side of a log m bias small enough to cache several of them: 256 KiB each in float32
Mode: TypeAlias = "FakeTensorMode | None"  # cached tensors belong to one mode; None for real tensors
HIDDEN = -1e30  # additive bias of a masked pair; with -inf aten would return lse 0


class Biases:
    """Cache the biases of a kernel's calls: at most 12 MiB of squares in float32, and 16 corners of bands."""

    def __init__(self) -> None:
        self._make_corners = lru_cache(16)(_make_corners)
        self._squares = lru_cache(2)(_make_weights)
        self._small_squares = lru_cache(16)(_make_weights)

    def drop(self) -> None:
        """Free all of them."""
        for cached in (self._make_corners, self._squares, self._small_squares):
            cached.cache_clear()

    def get_for_call(self, call: Tile, q: Tensor) -> Tensor | None:
        """Return the bias that is added to each score of q; None if there is none."""
        dtype, mode = q.dtype, q.fake_mode if isinstance(q, FakeTensor) else None
        queries, keys, inside = call.q_rows.length, call.k_rows.length, call.inside
        bias = None
        if inside is not None and inside.weights is not None:
            bias = self._log_weights(inside, queries, keys, dtype, mode)
        if any(call.edges) and not call.is_causal:
            hidden = self._make_corners(queries, keys, call.low, call.high, dtype, mode)
            return hidden if bias is None else bias + hidden
        if inside is not None and inside.mask is not None:
            # Not cached: it depends on this tile's positions, and may depend on the sample and the head.
            visible = inside.visible(len(q), queries, keys, torch.device("cpu"))
            bias = torch.zeros(visible.shape, dtype=dtype, device="cpu") if bias is None else bias
            return bias.masked_fill(~visible, HIDDEN)
        return bias

    def _log_weights(
        self, inside: TilePredicate, queries: int, keys: int, dtype: torch.dtype, mode: Mode
    ) -> Tensor:
        """Return log m of each pair; calls of any size with the same first positions share one square."""
        most = max(queries, keys)
        if inside.mask is not None or most > BIASED:
            return inside.bias(queries, keys, dtype, torch.device("cpu"))
        small = most <= SMALL_BIAS
        squares = self._small_squares if small else self._squares
        return squares(inside, SMALL_BIAS if small else BIASED, dtype, mode)[:queries, :keys]


@leave_inference_mode
def _make_corners(queries: int, keys: int, low: int, high: int, dtype: torch.dtype, mode: Mode) -> Tensor:
    """Return the bias that masks the pairs outside low <= i - j <= high."""
    hidden = torch.full((queries, keys), HIDDEN, dtype=dtype, device="cpu")
    return hidden.tril(-high - 1) + hidden.triu(1 - low)


@leave_inference_mode
def _make_weights(inside: TilePredicate, side: int, dtype: torch.dtype, mode: Mode) -> Tensor:
    return inside.bias(side, side, dtype, torch.device("cpu"))


def _convert_to_computable(*tensors: Tensor) -> list[Tensor]:
    """Return float64 and float32 unchanged, lower dtypes in float32, all with a dense last dimension.

    In the last dimension the operators read neighbours in memory, even if its stride is not 1 (it is 0 in
    the gradient of a sum).
    """
    converted = []
    for x in tensors:
        if x.dtype not in (torch.float32, torch.float64):
            x = x.float()
        converted.append(x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous())
    return converted


def _pad_heads(*tensors: Tensor) -> list[Tensor]:
    """Return tensors padded with zeros to one head dimension, which aten requires of q, k and v."""
    # Only the operands of one hop are padded, never a tensor that travels or is kept.
    width = max(x.shape[-1] for x in tensors)
    return [x if x.shape[-1] == width else pad(x, (0, width - x.shape[-1])) for x in tensors]


def _make_scale_positive(q: Tensor, scale: float) -> tuple[Tensor, float, int]:
    """Return queries and a positive scale with the same scores, and the factor of the queries' gradient.

    For a scale of 0 or below the aten operator returns NaN: it takes the maximum before it scales.
    """
    return (-q, -scale, -1) if scale < 0 else (q * 0, 1.0, 0)


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
                raise RingConfigError.wrong(
                    f'kernel_options of kernel "cpu": {option}', "1 token or more", tokens, "leave it out"
                )
        if triangle > block:
            raise RingConfigError.wrong(
                'kernel_options of kernel "cpu": triangle', f"at most block {block}", triangle, "raise block"
            )
        self._biases = Biases()
        self._forward = Sizes(block, triangle)
        self._backward = Sizes(block, triangle, backward=True)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, scale: float) -> Iterator[PartialOut]:
        width = v.shape[-1]
        padded = q.shape[-1] != width
        q, k, v = _convert_to_computable(q, k, v)
        if padded:
            q, k, v = _pad_heads(q, k, v)
        if scale <= 0:
            q, scale, _ = _make_scale_positive(q, scale)
        prepared = _prepare_calls(tiles, self._forward, q.shape[1] // k.shape[1])
        flash, _ = choose_cpu_flash()
        for tile, heads, rows, keys, causal, masked, log_weight, has_bias in prepared:
            out, lse = flash(
                *rows.views(q, heads=heads, batched=True),
                *keys.views(k, v, batched=True),
                0.0,
                causal,
                attn_mask=self._biases.get_for_call(tile, q) if has_bias else None,
                scale=scale,
            )
            # The same number added to every score of a call changes its lse and not its out.
            if log_weight:
                lse = lse + log_weight
            if masked:  # only in masked tiles may a row have no key; its lse is then about HIDDEN
                empty = lse < HIDDEN / 10
                out, lse = out.masked_fill(empty.unsqueeze(-1), 0), lse.masked_fill(empty, float("-inf"))
            if padded:
                out = out[..., :width]
            if rows.repeats > 1:
                apart = (-1, rows.repeats)
                out, lse = out.unflatten(0, apart), lse.unflatten(0, apart)
            yield PartialOut(heads, rows, out, lse)
            del out, lse  # else they stay alive while the next ones are computed

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tiles: Tiles,
        scale: float, grad_lse: Tensor | None = None,
    ) -> Iterator[PartialGrads]:  # fmt: skip
        width, v_width = q.shape[-1], v.shape[-1]
        grad_out, q, k, v, out = _convert_to_computable(grad_out, q, k, v, out)
        if grad_lse is not None:
            # The gradient of a score is p * (grad_out . v - grad_out . out), plus p * grad_lse. A further
            # column gives the last term: grad_lse in grad_out, 1 in v, and 0 in out (by the padding below).
            grad_out = torch.cat([grad_out, grad_lse.to(grad_out.dtype).unsqueeze(-1)], dim=-1)
            v = pad(v, (0, 1), value=1.0)
        padded = width != v.shape[-1] or grad_lse is not None
        if padded:
            grad_out, q, k, v, out = _pad_heads(grad_out, q, k, v, out)
        sign = 1
        if scale <= 0:
            q, scale, sign = _make_scale_positive(q, scale)
        prepared = _prepare_calls(tiles, self._backward, q.shape[1] // k.shape[1])
        _, flash_backward = choose_cpu_flash()
        for tile, heads, rows, keys, causal, masked, log_weight, has_bias in prepared:
            grad_t, q_t, out_t, lse_t = rows.views(grad_out, q, out, lse, heads=heads, batched=True)
            if masked:  # then exp(HIDDEN - 0) is 0: the row has no attention weights
                lse_t = lse_t.masked_fill(lse_t == float("-inf"), 0)
            if log_weight:  # exp(score + bias - lse), without a bias tensor
                lse_t = lse_t - log_weight
            bias = self._biases.get_for_call(tile, q) if has_bias else None
            k_t, v_t = keys.views(k, v, batched=True)
            dq, dk, dv = flash_backward(
                grad_t, q_t, k_t, v_t, out_t, lse_t, 0.0, causal, attn_mask=bias, scale=scale
            )
            del grad_t, q_t, out_t, lse_t, k_t, v_t, bias  # copies, if B and `repeats` are above 1
            if sign != 1:
                dq = dq * sign
            if padded:
                dq, dk, dv = dq[..., :width], dk[..., :width], dv[..., :v_width]
            if rows.repeats > 1:
                apart = (-1, rows.repeats)
                dq, dk, dv = dq.unflatten(0, apart), dk.unflatten(0, apart), dv.unflatten(0, apart)
            yield PartialGrads(heads, rows, keys, dq, dk, dv)
            del dq, dk, dv

    def select_heads(self, heads: slice) -> CpuKernel:
        return self

    def drop_cached(self) -> None:
        self._biases.drop()

    def count_executed_pairs(self, tiles: Tiles, backward: bool = False) -> int:
        return sum(
            call.q_rows.repeats * call.q_rows.length * call.k_rows.length
            for call in calls(tiles, self._backward if backward else self._forward)
        )
