"""The contracts of the CUDA operators that kernel "flash" calls, computed densely, in the inputs' dtype.

Written from torch 2.13's source (flash_api.cpp, attention.cu, mask.h), not from ds_ring: windows aligned at
the bottom right, what aten makes of them first, rows without keys, variable lengths, what is read as dense.
What an operator leaves unwritten is NaN here. A misuse that a GPU would answer with a fault is an assertion.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ds_ring.kernels.flash.executors import Operators

INFINITY = float("inf")
Check = Callable[..., None]


def emulated(empty_lse: float = INFINITY) -> Operators:
    """Operators with FlashAttention 2's lse of rows without keys, or with that of 3 and 4 (-inf)."""

    def forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **more: Any) -> tuple[Tensor, ...]:
        return flash_forward(q, k, v, *rest, empty_lse=empty_lse, **more)

    return Operators(forward, flash_backward, cudnn_forward, cudnn_backward)


def _check(*tensors: Tensor) -> None:
    """Assert what aten's operators demand."""
    for x in tensors:
        assert x.stride(-1) == 1 or x.shape[-1] == 1, "last stride"
        assert x.shape[-1] % 8 == 0 and x.shape[-1] <= 256, f"head_dim {x.shape[-1]}"
        assert x.shape[-1] == tensors[0].shape[-1], "one head_dim for all"


def _seen(queries: int, keys: int, left: int, right: int) -> Tensor:
    gap = torch.arange(keys)[None] - torch.arange(queries)[:, None] - (keys - queries)
    seen = torch.ones(queries, keys, dtype=torch.bool)
    if left >= 0:
        seen &= gap >= -left
    return seen & (gap <= right) if right >= 0 else seen


def _windows(is_causal: bool, left: int, right: int, max_q: int, max_k: int) -> tuple[int, int]:
    """What aten makes of the arguments before it launches a kernel."""
    left, right = (-1 if side >= max_k else side for side in (left, right))
    if is_causal and max_q > 1:
        right = 0
    # Of a window with one open side FlashAttention 2 makes one with two: an H200 has shown it.
    if left >= 0 and right < 0:
        right = max_k
    elif left < 0 and right > 0:
        left = max_k
    return left, right


def _sequences(
    q: Tensor, k: Tensor, cum_q: Tensor | None, cum_k: Tensor | None, max_q: int, max_k: int, windowed: bool
) -> Iterator[tuple[tuple[Any, ...], tuple[Any, ...]]]:
    """Where every sequence stands in queries and in keys."""
    if cum_q is None or cum_k is None:
        assert q.dim() == k.dim() == 4
        yield from (((b,), (b,)) for b in range(len(q)))
        return
    assert q.dim() == k.dim() == 3
    for cum in (cum_q, cum_k):
        assert cum.dtype == torch.int32 and cum.is_contiguous() and cum[0] == 0 and (cum.diff() >= 0).all()
    assert len(cum_q) == len(cum_k) and cum_q[-1] <= len(q) and cum_k[-1] <= len(k)
    assert cum_q.diff().max() <= max_q and cum_k.diff().max() <= max_k
    # it then swaps queries and groups, for which every sequence must have one query
    assert not (max_q == 1 and q.shape[1] > k.shape[1] and not windowed) or len(q) == len(cum_q) - 1
    pairs = (itertools.pairwise(cum.tolist()) for cum in (cum_q, cum_k))
    yield from (((slice(*a),), (slice(*b),)) for a, b in zip(*pairs, strict=True))


def flash_forward(
    q: Tensor, k: Tensor, v: Tensor, cum_q: Tensor | None, cum_k: Tensor | None, max_q: int, max_k: int,
    dropout: float, is_causal: bool, debug: bool, *, scale: float, window_size_left: int,
    window_size_right: int, empty_lse: float = INFINITY, check: Check = _check,
) -> tuple[Tensor, ...]:  # fmt: skip
    """`aten::_flash_attention_forward`: [B, S, H, D] or [total, H, D]; lse [B, H, S] or [H, total]."""
    check(q, k, v)
    assert not dropout and not debug and scale > 0 and q.dtype == k.dtype == v.dtype
    left, right = _windows(is_causal, window_size_left, window_size_right, max_q, max_k)
    out = q.new_full((*q.shape[:-1], v.shape[-1]), float("nan"))
    shape = (len(q), q.shape[2], q.shape[1]) if q.dim() == 4 else (q.shape[1], q.shape[0])
    lse = q.new_full(shape, float("nan"))
    windowed = left >= 0 or right >= 0
    for at_q, at_k in _sequences(q, k, cum_q, cum_k, max_q, max_k, windowed):
        scores, _ = _scores(q[at_q], k[at_k], left, right, scale)
        sums = scores.logsumexp(-1)
        empty = sums == -INFINITY
        weights = torch.exp(scores - sums.masked_fill(empty, 0)[..., None])
        out[at_q] = (weights @ _heads(v[at_k], q.shape[-2])).transpose(0, 1)
        lse[at_q if q.dim() == 4 else (slice(None), *at_q)] = sums.masked_fill(empty, empty_lse)
    unused = torch.full((2,), 7, dtype=torch.uint64)
    return out, lse, unused, unused, q.new_empty(0)


def flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cum_q: Tensor | None,
    cum_k: Tensor | None, max_q: int, max_k: int, dropout: float, is_causal: bool, rng: Any, unused: Any,
    *, scale: float, window_size_left: int, window_size_right: int, check: Check = _check,
) -> tuple[Tensor, ...]:  # fmt: skip
    """`aten::_flash_attention_backward`, which reads the lse as if it were contiguous."""
    check(q, k, v)
    check(grad, out)
    assert lse.is_contiguous() and not dropout and scale > 0
    left, right = _windows(is_causal, window_size_left, window_size_right, max_q, max_k)
    found = [torch.full_like(x, float("nan"), memory_format=torch.contiguous_format) for x in (q, k, v)]
    for at_q, at_k in _sequences(q, k, cum_q, cum_k, max_q, max_k, windowed=True):
        sums = lse[at_q if q.dim() == 4 else (slice(None), *at_q)]
        scores, keys = _scores(q[at_q], k[at_k], left, right, scale)
        parts = (x[at_q].transpose(0, 1) for x in (grad, q, out))
        values, groups = _heads(v[at_k], q.shape[-2]), k.shape[-2]
        for total, part, at in zip(
            found, _gradients(scores, sums, *parts, keys, values, scale), (at_q, at_k, at_k), strict=True
        ):
            heads = total.shape[-2]
            part = part if heads != groups else part.unflatten(0, (groups, -1)).sum(1)
            total[at] = part.transpose(0, 1)
    return tuple(found)


def _heads(x: Tensor, heads: int) -> Tensor:
    """[n, G, D] as [heads, n, D]."""
    return x.transpose(0, 1).repeat_interleave(heads // x.shape[1], dim=0)


def _scores(q: Tensor, k: Tensor, left: int, right: int, scale: float) -> tuple[Tensor, Tensor]:
    keys = _heads(k, q.shape[1])
    seen = _seen(len(q), len(k), left, right)
    return (q.transpose(0, 1) @ keys.mT * scale).masked_fill(~seen, -INFINITY), keys


def _gradients(
    scores: Tensor, sums: Tensor, grad: Tensor, q: Tensor, out: Tensor, keys: Tensor, values: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    weights = torch.exp(scores - sums[..., None])
    delta = (grad * out).sum(-1, keepdim=True)
    inner = weights * (grad @ values.mT - delta) * scale
    return inner @ keys, inner.mT @ q, weights.mT @ grad


def cudnn_forward(
    q: Tensor, k: Tensor, v: Tensor, bias: None, want_lse: bool, dropout: float, is_causal: bool, debug: bool,
    *, scale: float,
) -> tuple[Any, ...]:  # fmt: skip
    """`aten::_scaled_dot_product_cudnn_attention`: [B, H, S, D], the diagonal from the top left."""
    _check(q, k, v)
    assert want_lse and not dropout and not debug and bias is None and q.dim() == 4
    scores = _cudnn_scores(q, k, is_causal, scale)
    lse = scores.logsumexp(-1, keepdim=True)
    out = torch.empty_like(q)  # of q's layout
    out.copy_(torch.exp(scores - lse) @ v.repeat_interleave(q.shape[1] // v.shape[1], dim=1))
    return out, lse, None, None, q.shape[2], k.shape[2], None, None, None


def _cudnn_scores(q: Tensor, k: Tensor, is_causal: bool, scale: float) -> Tensor:
    scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], dim=1).mT * scale
    below = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    return scores.masked_fill(~below, -INFINITY) if is_causal else scores


def cudnn_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, seed: Any, offset: Any,
    bias: None, cum_q: None, cum_k: None, max_q: int, max_k: int, dropout: float, is_causal: bool,
    *, scale: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    """`aten::_scaled_dot_product_cudnn_attention_backward`, with the lse as its forward returns it."""
    _check(grad, q, k, v, out)
    assert lse.shape == (*q.shape[:3], 1) and lse.is_contiguous() and not dropout
    assert (max_q, max_k) == (q.shape[2], k.shape[2])
    # Torch finds the compiled graph by q, k and v alone: with other strides it reads other elements.
    usual = torch.empty_like(q).stride()
    for size, *strides in zip(q.shape, usual, grad.stride(), out.stride(), strict=True):
        assert size == 1 or len(set(strides)) == 1, "strides of another graph than of torch's own attention"
    assert (max_q, max_k) != (1, 1), "s_q = s_kv = 1 is not supported"  # of cuDNN 9.19 on an H200
    groups = k.shape[1]
    keys, values = (x.repeat_interleave(q.shape[1] // groups, dim=1) for x in (k, v))
    scores = _cudnn_scores(q, k, is_causal, scale)
    dq, dk, dv = _gradients(scores, lse.squeeze(-1), grad, q, out, keys, values, scale)
    # Of 9.19 on sm_90: padding of a tile of 128 keys has the score 0, whose exp(0 - lse) overflows.
    if bool((lse < -88.7).any()):
        dq = dq * float("nan") if not is_causal and max_k % 128 == 64 else dq
        dk, dv = (x * float("nan") if (max_q, max_k) == (1, 128) else x for x in (dk, dv))
    return dq, *(x.unflatten(1, (groups, -1)).sum(2) for x in (dk, dv))
