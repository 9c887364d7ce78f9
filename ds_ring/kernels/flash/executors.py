"""Carry out a `FlashCall`, forward and backward, by one of torch's operators. Each executor is one pair.

- `Flash`: any call by FlashAttention, 2 of aten for CUDA, 3 and 4 of their packages (`packages.py`).
- `Cudnn`: cuDNN's attention: whole rectangles, and causal ones whose diagonal is at the top left.
- `OnCpu`: aten's operator for the CPU.

Read from torch 2.13's source (flash_api.cpp, attention.cu, MHA.cpp): [B, S, H, D] or, with variable lengths,
[total, H, D]; only the last stride must be 1, so a call is a view. The lse is read as if it were contiguous,
natural, float32. A query without keys has out 0 and the lse +inf (FlashAttention 2) or -inf (3 and 4); here
it is -inf, and +inf on the way back. Philox arguments are not read without dropout.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ds_ring.compat.torch import cpu_flash, cpu_flash_backward
from ds_ring.kernels.flash.calls import OPEN, FlashCall
from ds_ring.kernels.interface import Rows

INFINITY = float("inf")
WIDEST = 256  # head dimension of FlashAttention 2, which takes multiples of 8
# The greatest head dimensions of queries and of values; None: equal ones, multiples of 8.
Widths = tuple[tuple[int, int | None], ...]


class BackwardInputs(NamedTuple):
    """Hold what a backward pass reads of queries: `out` and `lse` are global, the lse +inf without keys."""

    grad_out: Tensor
    q: Tensor
    out: Tensor
    lse: Tensor


class CallSizes(NamedTuple):
    """The sizes of a pass, as far as rules of executors depend on them; heads are those of the pass.

    Attributes:
        samples, heads, kv_heads: of the tensors.
        head_dim: the wider one of queries and values, padded.
        backward: whether gradients are computed.
    """

    samples: int
    heads: int
    kv_heads: int
    head_dim: int
    backward: bool


class Platform(NamedTuple):
    """Name the device and cuDNN. By default the one with most faults that are known.

    Attributes:
        generation: the device's major compute capability.
        cudnn: the version as torch tells it: 91900 is 9.19.0.
    """

    generation: int = 9
    cudnn: int = 91900


class Operators(NamedTuple):
    """Hold the operators that executors call; tests put others in their place."""

    flash_forward: Callable[..., Any] = torch.ops.aten._flash_attention_forward.default
    flash_backward: Callable[..., Any] = torch.ops.aten._flash_attention_backward.default
    cudnn_forward: Callable[..., Any] = torch.ops.aten._scaled_dot_product_cudnn_attention.default
    cudnn_backward: Callable[..., Any] = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default
    cpu_forward: Callable[..., Any] = cpu_flash
    cpu_backward: Callable[..., Any] = cpu_flash_backward


ATEN = Operators()


def needs_equal_bits() -> bool:
    """Return whether torch asks for equal bits in each run: with `warn_only` it does not."""
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    return torch.are_deterministic_algorithms_enabled() and not warns


class Views:
    """Results of functions of the queries, kept for one pass; what depends on keys is never kept."""

    def __init__(self) -> None:
        self._made: dict[int, dict[Any, Any]] = {}

    def once(self, make: Callable[..., Any], tensors: tuple[Any, ...], *how: Any) -> Any:
        """Return `make(*tensors, *how)`, computed once in a pass; `tensors` must not change during the pass.

        The result is found by the first entry of `tensors`, a tensor; the other entries belong to it.
        """
        # Keep `tensors` as well, so that no other tensor gets its id.
        results = self._made.setdefault(id(tensors[0]), {None: tensors})
        key = (make, how)
        if key not in results:
            results[key] = make(*tensors, *how)
        return results[key]


class Executor(ABC):
    """Carry out calls by some of torch's operators.

    q [B, heads, S, D], k and v [B, G, n, D] are whole shards and payloads; results have the shape of
    `call.q_rows.select(q)`, `call.k_rows.select(k)`, an lse that of its queries; a query without keys has
    out 0 and the lse -inf.

    Attributes:
        tokens_first: whether it copies a gradient or an output in [B, H, S, D] memory order. Then it returns
            results of plain calls in [B, S, H, D] memory order.
        name: of the implementation, for messages.
        calls_aten: whether it calls operators of torch, which `activate_flash_attention_impl` can replace.
    """

    name: str
    tokens_first: bool

    def __init__(self, operators: Operators = ATEN, widths: Widths = ((WIDEST, None),)) -> None:
        self._operators, self._widths = operators, widths
        self.calls_aten = operators is ATEN

    def padded(self, head_dim: int, value_dim: int) -> tuple[int, int] | None:
        """Return the head dimensions of queries and values that it computes with; None if too wide."""
        for most, most_of_values in self._widths:
            if head_dim <= most and value_dim <= (most_of_values or most):
                equal = -(-max(head_dim, value_dim) // 8) * 8
                return (equal, equal) if most_of_values is None else (most, most_of_values)
        return None

    def takes(self, call: FlashCall, sizes: CallSizes) -> bool:
        """Return whether it can carry out this call in a pass of these sizes."""
        return True

    def fits(self, call: FlashCall, sizes: CallSizes) -> bool:
        """Return whether its offsets reach all rows of the call; if not, the call is split."""
        return True

    @abstractmethod
    def forward(
        self, views: Views, call: FlashCall, q: Tensor, k: Tensor, v: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Return out and lse over the keys of the call."""

    @abstractmethod
    def backward(
        self, views: Views, call: FlashCall, queries: BackwardInputs, k: Tensor, v: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return dq, dk, dv of the call, whose bias is added to its scores."""


OFFSETS = 1 << 31  # of int32


class Flash(Executor):
    """Call FlashAttention."""

    name, tokens_first = "FA2", True

    def __init__(
        self, operators: Operators = ATEN, widths: Widths = ((WIDEST, None),), name: str = "FA2"
    ) -> None:
        super().__init__(operators, widths)
        self.name = name

    def fits(self, call: FlashCall, sizes: CallSizes) -> bool:
        # The backward kernel of FlashAttention 2.7.4, which torch has, computes the first element of a block
        # of dQ in int32: row x heads x D; with variable lengths each sequence has 128 rows more.
        if not sizes.backward:
            return True
        heads = sizes.heads * (sizes.samples if call.q_ends else 1)
        return call.dq_rows * heads * _round_width(sizes.head_dim) < OFFSETS

    def forward(
        self, views: Views, call: FlashCall, q: Tensor, k: Tensor, v: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        view = _view_packed if call.q_ends else view_tokens_first
        left, right = _get_window(call)
        out, lse, *_ = self._operators.flash_forward(
            views.once(view, (q,), call.q_rows), view(k, call.k_rows), view(v, call.k_rows),
            *_get_lengths(call, q), 0.0, call.is_causal, False,
            scale=scale, window_size_left=left, window_size_right=right,
        )  # fmt: skip
        if call.is_plain:
            return out.transpose(1, 2), lse
        if call.has_empty_rows:
            lse = lse.masked_fill(lse == INFINITY, -INFINITY)
        return restore_shape(out, call.q_rows, len(q), call), restore_lse(lse, call, len(q))

    def backward(
        self, views: Views, call: FlashCall, queries: BackwardInputs, k: Tensor, v: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        view, rows, keys = _view_packed if call.q_ends else view_tokens_first, call.q_rows, call.k_rows
        grad_out, q, out, lse = views.once(select_inputs, queries, view, rows, call.bias, bool(call.q_ends))
        left, right = _get_window(call)
        dq, dk, dv = self._operators.flash_backward(
            grad_out, q, view(k, keys), view(v, keys), out, lse,
            *_get_lengths(call, q), 0.0, call.is_causal,
            lse, lse,  # in the place of Philox, which is not read
            scale=scale, window_size_left=left, window_size_right=right,
        )  # fmt: skip
        if call.is_plain:
            return dq, dk, dv
        samples = len(queries.q)
        return (
            restore_shape(dq, rows, samples, call),
            restore_shape(dk, keys, samples, call),
            restore_shape(dv, keys, samples, call),
        )


class Cudnn(Executor):
    """Call cuDNN's attention, whose causal diagonal begins at the top left."""

    name, tokens_first = "cuDNN", False

    def __init__(self, operators: Operators = ATEN, platform: Platform | None = None) -> None:
        super().__init__(operators)
        self._platform = platform or Platform()

    def takes(self, call: FlashCall, sizes: CallSizes) -> bool:
        queries, keys = call.q_rows.length, call.k_rows.length
        full = call.left == OPEN and call.right == OPEN
        if call.q_ends or not (full or (call.is_causal and queries == keys)):
            return False
        generation, version = self._platform
        # Wrong tokens at fewer than eight K/V heads (pytorch 193893, no version without it is known).
        if generation == 10 and sizes.kv_heads < 8:
            return False
        if not sizes.backward:
            return True
        # It has no backward pass of one query with one key. Of one query with 128 keys dK and dV are NaN if
        # the lse is low, in 9.26 as well (cudnn-frontend 1072).
        if queries == 1:
            return False
        # Without a causal mask a last tile of 64 keys makes NaN of dQ where the lse is below -88.7, before
        # version 9.26 (cudnn-frontend 628, pytorch 196678). Only whole tiles are taken there.
        return call.is_causal or generation != 9 or version >= 92600 or keys % 128 == 0

    def forward(
        self, views: Views, call: FlashCall, q: Tensor, k: Tensor, v: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        out, lse, *_ = self._operators.cudnn_forward(
            views.once(_view_heads_first, (q,), call.q_rows),
            _view_heads_first(k, call.k_rows), _view_heads_first(v, call.k_rows),
            None, True, 0.0, call.is_causal, False, scale=scale,
        )  # fmt: skip
        # [B, H, S, 1] in torch 2.13
        lse = lse.reshape(out.shape[:3])
        if call.is_plain:
            return out, lse
        return restore_shape(out.transpose(1, 2), call.q_rows, len(q), call), restore_lse(lse, call, len(q))

    def backward(
        self, views: Views, call: FlashCall, queries: BackwardInputs, k: Tensor, v: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows, keys = call.q_rows, call.k_rows
        grad_out, q, out, lse = views.once(_lay_out_as_queries, queries, rows, call.bias)
        gradients = self._operators.cudnn_backward(
            grad_out, q, _view_heads_first(k, keys), _view_heads_first(v, keys), out,
            lse.unsqueeze(-1), lse, lse, None, None, None,
            rows.length, keys.length, 0.0, call.is_causal, scale=scale,
        )  # fmt: skip
        dq, dk, dv = gradients
        if call.is_plain:
            return dq, dk, dv
        sides = ((dq, rows), (dk, keys), (dv, keys))
        dq, dk, dv = (restore_shape(x.transpose(1, 2), side, len(queries.q), call) for x, side in sides)
        return dq, dk, dv


def _round_width(head_dim: int) -> int:
    """Return the head dimension of FlashAttention's float32 dQ."""
    multiple = 32 if head_dim <= 128 else 64
    return -(-head_dim // multiple) * multiple


def _get_window(call: FlashCall) -> tuple[int, int]:
    # is_causal implies it; FlashAttention 3 takes no None
    return (OPEN, OPEN) if call.is_causal else (call.left, call.right)


def _get_lengths(call: FlashCall, like: Tensor) -> tuple[Any, ...]:
    """Return cum_seq_q, cum_seq_k, max_q, max_k."""
    if not call.q_ends:
        return None, None, call.q_rows.length, call.k_rows.length
    queries, keys = (max(lengths) for lengths in zip(*call.lengths, strict=True))
    # with a max_q of 1 FlashAttention 2 takes it that every sequence has one query
    # One copy to the device for all layers and steps; the host does not wait for it.
    ends = call.tables.numbers((call.q_ends, call.k_ends), like.device, torch.int32)
    return ends[0], ends[1], max(queries, 2), keys


def select_inputs(
    grad_out: Tensor, q: Tensor, out: Tensor, lse: Tensor,
    view: Callable[..., Tensor], rows: Rows, bias: float, packed: bool,
) -> BackwardInputs:  # fmt: skip
    """Return what a call reads of the queries, in views of its rows; the lse is contiguous."""
    lse = lse - bias if bias else lse  # exp(score + bias - lse) without a bias tensor
    return BackwardInputs(
        view(grad_out, rows), view(q, rows), view(out, rows), _select_lse(lse, rows, packed)
    )


# Torch finds a compiled cuDNN graph by the sizes and strides of q, k and v alone (MHAParams in MHA.cpp), but
# the graph has the strides of `out` and its gradient, too. With other ones the graph of another call, of
# torch's own attention perhaps, would read other elements. Both get the strides that torch's forward gives.
def _lay_out_as_queries(
    grad_out: Tensor, q: Tensor, out: Tensor, lse: Tensor, rows: Rows, bias: float
) -> BackwardInputs:
    laid_out = select_inputs(grad_out, q, out, lse, _view_heads_first, rows, bias, False)
    strides = torch.empty_like(laid_out.q, device="meta").stride()
    order = sorted(range(laid_out.q.dim()), key=lambda dim: -strides[dim])
    back = [order.index(dim) for dim in range(len(order))]
    grad_out, out = (x.permute(order).contiguous().permute(back) for x in (laid_out.grad_out, laid_out.out))
    return laid_out._replace(grad_out=grad_out, out=out)


def view_tokens_first(x: Tensor, rows: Rows) -> Tensor:
    """View rows of x [B, H, S, D] as [B, n, H, D]; repetitions are the batch, samples then heads."""
    part = rows.select(x)
    return part.transpose(1, 2) if rows.repeats == 1 else part.permute(1, 3, 0, 2, 4).flatten(2, 3)


def _view_heads_first(x: Tensor, rows: Rows) -> Tensor:
    return view_tokens_first(x, rows).transpose(1, 2)


def _view_packed(x: Tensor, rows: Rows) -> Tensor:
    """View rows of x [B, H, S, D] as [n, B * H, D]."""
    return rows.select(x).permute(2, 0, 1, 3).flatten(1, 2)


def restore_shape(x: Tensor, rows: Rows, samples: int, call: FlashCall) -> Tensor:
    """Return the shape of `rows.select`."""
    if call.q_ends:
        return x.unflatten(1, (samples, -1)).permute(1, 2, 0, 3)
    if rows.repeats == 1:
        return x.transpose(1, 2)
    return x.unflatten(2, (samples, -1)).permute(2, 0, 3, 1, 4)


def restore_lse(lse: Tensor, call: FlashCall, samples: int) -> Tensor:
    """Return an lse [H, total] or [B, H, n] in the shape of `rows.select`."""
    if call.q_ends:
        return lse.unflatten(0, (samples, -1))
    return lse if call.q_rows.repeats == 1 else lse.unflatten(1, (samples, -1)).transpose(0, 1)


def _select_lse(lse: Tensor, rows: Rows, packed: bool) -> Tensor:
    """Return the lse [B, H, S] as the operators read it: contiguous, heads before tokens."""
    part = rows.select(lse)
    if packed:
        part = part.flatten(0, 1)
    elif rows.repeats > 1:
        part = part.transpose(0, 1).flatten(1, 2)
    return part.contiguous()


# Aten's operator for the CPU knows full rectangles, and triangles from the top left. Every other window is
# cut into strips of queries, each one rectangle with a bias that hides its corners.

STRIP = 128  # queries of one strip
HIDDEN = -1e30  # additive bias of a pair that is not attended; -inf would return lse 0


class OnCpu(Executor):
    """Call aten's operator for the CPU: float32 and float64, one sequence after the other."""

    name, tokens_first = "aten's for the CPU", False

    def padded(self, head_dim: int, value_dim: int) -> tuple[int, int]:
        return (max(head_dim, value_dim),) * 2

    def forward(
        self, views: Views, call: FlashCall, q: Tensor, k: Tensor, v: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        (q_all,) = call.q_rows.views(q, batched=True)
        k_all, v_all = call.k_rows.views(k, v, batched=True)
        out = torch.zeros_like(q_all, memory_format=torch.contiguous_format)
        lse = q_all.new_full(q_all.shape[:-1], -INFINITY)
        for strip in _split_strips(call):
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
        self, views: Views, call: FlashCall, queries: BackwardInputs, k: Tensor, v: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows, keys = call.q_rows, call.k_rows
        grad, q_all, whole, sums = rows.views(*queries, batched=True)
        k_all, v_all = keys.views(k, v, batched=True)
        # exp(hidden - 0) is 0, as the weights of a row without keys must be
        sums = (sums - call.bias).masked_fill(sums == INFINITY, 0)
        dq, dk, dv = (
            torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q_all, k_all, v_all)
        )
        for strip in _split_strips(call):
            i, j = strip.queries, strip.keys
            gradients = self._operators.cpu_backward(
                grad[:, :, i], q_all[:, :, i], k_all[:, :, j], v_all[:, :, j], whole[:, :, i], sums[:, :, i],
                0.0, strip.is_causal, attn_mask=strip.bias(q_all), scale=scale,
            )  # fmt: skip
            for total, part, where in zip((dq, dk, dv), gradients, (i, j, j), strict=True):
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


def _split_strips(call: FlashCall) -> Iterator[_Strip]:
    i0 = j0 = 0
    for queries, keys in call.lengths:
        yield from _split_sequence(call, i0, j0, queries, keys)
        i0, j0 = i0 + queries, j0 + keys


def _split_sequence(call: FlashCall, i0: int, j0: int, queries: int, keys: int) -> Iterator[_Strip]:
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


def _unbatch(rows: Rows, x: Tensor) -> Tensor:
    return x if rows.repeats == 1 else x.unflatten(0, (-1, rows.repeats))
