"""Stand in for the package flash-attn 2.8, which needs a GPU: its functions, computed densely on the CPU.

Signatures and results are those of its module `flash_attn_interface`. Peers that call it run as they are;
what this shows of them is their own exchange and merging.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import math
import sys
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

VERSION = "2.8.3"


def _seen(queries: int, keys: int, causal: bool, left: int, right: int) -> Tensor:
    """Return whether a query sees a key; both ends are aligned at the bottom right."""
    gap = torch.arange(queries)[:, None] + (keys - queries) - torch.arange(keys)[None]
    right = 0 if causal else right
    seen = torch.ones_like(gap, dtype=torch.bool)
    seen = seen & (gap <= left) if left >= 0 else seen
    return seen & (gap >= -right) if right >= 0 else seen


def _wide(x: Tensor, heads: int) -> Tensor:
    return x.transpose(0, 1).float().repeat_interleave(heads // x.shape[1], dim=0)


def _forward(q: Tensor, k: Tensor, v: Tensor, scale: float, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Attend [S, H, D]; lse [H, S]."""
    scores = (_wide(q, q.shape[1]) @ _wide(k, q.shape[1]).mT * scale).masked_fill(~seen, -math.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse[..., None]).exp().nan_to_num(0.0)
    return (weights @ _wide(v, q.shape[1])).transpose(0, 1).to(q.dtype), lse


def _backward(operands: tuple[Tensor, ...], scale: float, seen: Tensor) -> tuple[Tensor, ...]:
    grad, q, k, v, out, lse = operands
    heads = q.shape[1]
    wide_q, wide_k, wide_v = _wide(q, heads), _wide(k, heads), _wide(v, heads)
    scores = (wide_q @ wide_k.mT * scale).masked_fill(~seen, -math.inf)
    weights = (scores - lse[..., None].float()).exp().nan_to_num(0.0)
    wide_grad = grad.transpose(0, 1).float()
    delta = (wide_grad * out.transpose(0, 1).float()).sum(-1, keepdim=True)
    inner = weights * (wide_grad @ wide_v.mT - delta) * scale
    grouped = (inner.mT @ wide_q, weights.mT @ wide_grad)
    dk, dv = (x.unflatten(0, (k.shape[1], -1)).sum(1).transpose(0, 1).to(k.dtype) for x in grouped)
    return (inner @ wide_k).transpose(0, 1).to(q.dtype), dk, dv


def _flash_attn_forward(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float, softmax_scale: float, causal: bool,
    window_size_left: int = -1, window_size_right: int = -1, softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, return_softmax: bool = False,
) -> tuple[Any, ...]:  # fmt: skip
    seen = _seen(q.shape[1], k.shape[1], causal, window_size_left, window_size_right)
    rows = [_forward(*sample, softmax_scale, seen) for sample in zip(q, k, v, strict=True)]
    return torch.stack([out for out, _ in rows]), torch.stack([lse for _, lse in rows]), None, None


def _flash_attn_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor, dk: Tensor,
    dv: Tensor, dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int = -1,
    window_size_right: int = -1, softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, rng_state: Tensor | None = None,
) -> Tensor:  # fmt: skip
    seen = _seen(q.shape[1], k.shape[1], causal, window_size_left, window_size_right)
    for row, operands in enumerate(zip(dout, q, k, v, out, softmax_lse, strict=True)):
        grads = _backward(operands, softmax_scale, seen)
        for into, gradient in zip((dq, dk, dv), grads, strict=True):
            into[row].copy_(gradient)
    return softmax_lse


def _sequences(ends_q: Tensor, ends_k: Tensor) -> list[tuple[slice, slice]]:
    pairs = zip(ends_q.tolist(), ends_q.tolist()[1:], ends_k.tolist(), ends_k.tolist()[1:], strict=False)
    return [(slice(a, b), slice(c, d)) for a, b, c, d in pairs]


def _flash_attn_varlen_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int = -1,
    window_size_right: int = -1, softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    return_softmax: bool = False, block_table: Tensor | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    out, lse = torch.zeros_like(q), torch.full((q.shape[1], len(q)), -math.inf)
    for mine, theirs in _sequences(cu_seqlens_q, cu_seqlens_k):
        count, keys = mine.stop - mine.start, theirs.stop - theirs.start
        seen = _seen(count, keys, causal, window_size_left, window_size_right)
        out[mine], lse[:, mine] = _forward(q[mine], k[theirs], v[theirs], softmax_scale, seen)
    return out, lse, None, None


def _flash_attn_varlen_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor, dk: Tensor,
    dv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int = -1,
    window_size_right: int = -1, softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, rng_state: Tensor | None = None,
) -> Tensor:  # fmt: skip
    for x in (dq, dk, dv):
        x.zero_()
    for mine, theirs in _sequences(cu_seqlens_q, cu_seqlens_k):
        count, keys = mine.stop - mine.start, theirs.stop - theirs.start
        seen = _seen(count, keys, causal, window_size_left, window_size_right)
        operands = (dout[mine], q[mine], k[theirs], v[theirs], out[mine], softmax_lse[:, mine])
        grads = _backward(operands, softmax_scale, seen)
        for into, gradient, at in zip((dq, dk, dv), grads, (mine, theirs, theirs), strict=True):
            into[at] = gradient
    return softmax_lse


def install() -> None:
    """Put the stand-in where the package would be, unless that is installed."""
    if importlib.util.find_spec("flash_attn") is None:
        package, interface = ModuleType("flash_attn"), ModuleType("flash_attn.flash_attn_interface")
        functions = {name: value for name, value in globals().items() if name.startswith("_flash_attn")}
        vars(interface).update(functions)
        vars(package).update(flash_attn_interface=interface, flash_attn_func=None, __version__=VERSION)
        for name, module in (("flash_attn", package), ("flash_attn.flash_attn_interface", interface)):
            module.__spec__ = importlib.machinery.ModuleSpec(name, None)
            sys.modules[name] = module
