"""Carry out a `FlashCall` by aten's attention operator for the CPU, so that CI executes the list of calls.

That operator knows full rectangles and triangles from the top left; every other window is cut into strips of
queries, each one rectangle with a bias that hides its corners.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ds_ring.runtime.kernels.flash_calls import FlashCall
from ds_ring.runtime.kernels.flash_executors import INFINITY, CallsOperators, OfQueries
from ds_ring.runtime.kernels.flash_pieces import OPEN
from ds_ring.runtime.kernels.interface import Rows
from ds_ring.runtime.views import Views

STRIP = 128  # queries of one strip
HIDDEN = -1e30  # additive bias of a pair that is not attended; -inf would return lse 0


class OnCpu(CallsOperators):
    """Call aten's operator for the CPU: float32 and float64, one sequence after the other."""

    name, multiple, tokens_first = "cpu", 1, False
    widest: int | None = None

    def takes(self, call: FlashCall) -> bool:
        return True

    def forward(
        self, views: Views, call: FlashCall, q: Tensor, k: Tensor, v: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        q_all, k_all, v_all = (
            _batch(r, x) for r, x in ((call.q_rows, q), (call.k_rows, k), (call.k_rows, v))
        )
        out = torch.zeros_like(q_all, memory_format=torch.contiguous_format)
        lse = q_all.new_full(q_all.shape[:-1], -INFINITY)
        for strip in _strips(call):
            queries, keys = strip.queries, strip.keys
            part, part_lse = self._operators.cpu_forward(
                q_all[:, :, queries], k_all[:, :, keys], v_all[:, :, keys], 0.0, strip.is_causal,
                attn_mask=strip.bias(q), scale=scale,
            )  # fmt: skip
            # with hidden keys alone the lse is about HIDDEN, far below that of any row with a real key
            empty = part_lse < HIDDEN / 10
            out[:, :, queries] = part.masked_fill(empty.unsqueeze(-1), 0)
            lse[:, :, queries] = part_lse.masked_fill(empty, -INFINITY)
        return _unbatch(call.q_rows, out), _unbatch(call.q_rows, lse)

    def backward(
        self, views: Views, call: FlashCall, queries: OfQueries, k: Tensor, v: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows, keys = call.q_rows, call.k_rows
        grad, q_all, whole, sums = (_batch(rows, x) for x in queries)
        k_all, v_all = _batch(keys, k), _batch(keys, v)
        # exp(hidden - 0) is 0, as the weights of a row without keys must be
        sums = (sums - call.bias).masked_fill(sums == INFINITY, 0)
        dq, dk, dv = (
            torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q_all, k_all, v_all)
        )
        for strip in _strips(call):
            i, j = strip.queries, strip.keys
            found = self._operators.cpu_backward(
                grad[:, :, i], q_all[:, :, i], k_all[:, :, j], v_all[:, :, j], whole[:, :, i], sums[:, :, i],
                0.0, strip.is_causal, attn_mask=strip.bias(q_all), scale=scale,
            )  # fmt: skip
            for total, part, where in zip((dq, dk, dv), found, (i, j, j), strict=True):
                total[:, :, where] += part
        return _unbatch(rows, dq), _unbatch(keys, dk), _unbatch(keys, dv)


class _Strip(NamedTuple):
    """Hold a rectangle of a call: query i sees key j if least <= j - i <= most, counted inside it."""

    queries: slice
    keys: slice
    least: int
    most: int
    is_causal: bool = False

    def bias(self, like: Tensor) -> Tensor | None:
        """Return what hides the pairs outside the window; None where there are none."""
        n, m = (side.stop - side.start for side in (self.queries, self.keys))
        if self.is_causal or (self.least <= 1 - n and self.most >= m - 1):
            return None
        hidden = like.new_full((n, m), HIDDEN)
        low, high = max(self.least, -n), min(self.most, m)
        return hidden.tril(low - 1) + hidden.triu(high + 1)


def _strips(call: FlashCall) -> Iterator[_Strip]:
    i0 = j0 = 0
    for queries, keys in call.lengths:
        yield from _strips_of_one(call, i0, j0, queries, keys)
        i0, j0 = i0 + queries, j0 + keys


def _strips_of_one(call: FlashCall, i0: int, j0: int, queries: int, keys: int) -> Iterator[_Strip]:
    """Yield the rectangles of one sequence; whole where nothing is hidden or it is a square triangle."""
    triangle = call.is_causal and queries == keys
    if triangle or (call.left == OPEN and call.right == OPEN):
        if queries and keys:
            yield _Strip(slice(i0, i0 + queries), slice(j0, j0 + keys), -queries, keys, triangle)
        return
    shift = keys - queries
    least = -queries if call.left == OPEN else shift - call.left
    most = keys if call.right == OPEN else shift + call.right
    for first in range(0, queries, STRIP):
        end = min(first + STRIP, queries)
        low, high = max(0, first + least), min(keys, end - 1 + most + 1)
        if low < high:
            where = slice(i0 + first, i0 + end), slice(j0 + low, j0 + high)
            yield _Strip(*where, least + first - low, most + first - low)


def _batch(rows: Rows, x: Tensor) -> Tensor:
    return rows.of(x) if rows.repeats == 1 else rows.of(x).flatten(0, 1)


def _unbatch(rows: Rows, x: Tensor) -> Tensor:
    return x if rows.repeats == 1 else x.unflatten(0, (-1, rows.repeats))
