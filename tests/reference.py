"""Dense attention in float64: what every result is held against. Written without ds_ring's kernels."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf, isnan
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ds_ring.masks.pattern import Pattern


class Dense(NamedTuple):
    """Output, lse and the three gradients of dense attention, float64, global."""

    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


def dense_attention(
    q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor, pattern: Pattern, grad_lse: Tensor | None = None
) -> Dense:
    """Softmax attention of [B, H, T, D] over [B, G, T, D], log m of the pattern added to the scores."""
    heads, rows, columns = q.shape[1], np.arange(q.shape[2])[:, None], np.arange(k.shape[2])[None, :]
    counts = [pattern.multiplicity(h, heads, k.shape[1], rows, columns) for h in range(heads)]
    return attend_by_counts(q, k, v, grad_out, torch.from_numpy(np.stack(counts)), grad_lse)


def attend_by_counts(
    q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor, m: Tensor, grad_lse: Tensor | None = None,
    scale: float | None = None,
) -> Dense:  # fmt: skip
    """Softmax attention in which each pair counts `m` times, or, of booleans, where it is true.

    `m` has the shape of the scores [B, H, T, S], or of their last dimensions.
    """
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    k_all, v_all = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    log_m = m.to(q.device).double().log()
    scores = q @ k_all.mT * (q.shape[-1] ** -0.5 if scale is None else scale) + log_m
    lse = torch.logsumexp(scores, dim=-1)
    sees = (log_m > -torch.inf).any(-1, keepdim=True)
    finite = torch.where(sees, scores, 0.0)
    out = torch.softmax(finite, dim=-1) * sees @ v_all
    results, grads = [out], [grad_out.double()]
    if grad_lse is not None:
        results.append(finite.logsumexp(dim=-1))
        grads.append(grad_lse.double() * sees.squeeze(-1))
    torch.autograd.backward(results, grads)
    return Dense(out.detach(), lse.detach(), q.grad, k.grad, v.grad)


def worst(errors: Iterable[float]) -> float:
    """The largest of some errors; NaN, which `max` may pass over, counts as infinite."""
    return max((inf if isnan(error) else error for error in errors), default=inf)


def relative_error(got: Tensor, want: Tensor) -> float:
    """Largest absolute difference over the largest magnitude wanted; NaN counts as infinite."""
    got, want = got.detach().double(), want.detach().double()
    error = (got - want).abs().max() / want.abs().max()
    return float("inf") if bool(error.isnan()) else float(error)
