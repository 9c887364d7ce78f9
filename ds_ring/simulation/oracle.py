"""Compute attention of some rows in float64 by the definition, to compare a simulation with.

Owns nothing of tiles, plans or kernels: every key is looked at, and the pattern is asked pair by pair
(`Pattern.multiplicity`). Legend: n rows, T tokens, D head dim.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ds_ring.masks.pattern import Pattern
from ds_ring.masks.tiles import IntArray
from ds_ring.simulation.rank import Source

PAIRS_AT_ONCE = 1 << 22  # of one head: 32 MiB for each float64 matrix of them


class Exact(NamedTuple):
    """Hold exact attention of n queries, float64: out, dq [B, H, n, D], lse [B, H, n].

    dk, dv [B, G, T, D] are those of a loss over these rows alone; None, like dq, without a gradient.
    """

    out: Tensor
    lse: Tensor
    dq: Tensor | None
    dk: Tensor | None
    dv: Tensor | None


def sampled_rows(tokens: int, count: int, seed: int = 0) -> IntArray:
    """Return `count` positions in ascending order, the first and last included; all if there are no more."""
    if count >= tokens:
        return np.arange(tokens)
    drawn = np.random.default_rng(seed).choice(tokens, size=count, replace=False)
    return np.unique([0, tokens - 1, *drawn[2:].tolist()])


def exact_rows(source: Source, pattern: Pattern, rows: IntArray, scale: float, backward: bool) -> Exact:
    """Return exact attention of the queries at `rows` over all tokens, computed head by head.

    Args:
        source: q, k, v, and grad_out for the backward pass.
        pattern: what attends to what.
        rows: positions of queries, int64 [n].
        scale: of the scores.
        backward: also the gradients.
    """
    sizes = source.geometry
    group, count = sizes.query_heads // sizes.kv_heads, len(rows)
    out = torch.zeros(sizes.batch, sizes.query_heads, count, sizes.width("out"), dtype=torch.float64)
    lse = torch.full(out.shape[:-1], -torch.inf, dtype=torch.float64)
    dq = lse.new_zeros(*lse.shape, sizes.head_dim) if backward else None
    everything = (sizes.batch, sizes.kv_heads, sizes.tokens)
    dk, dv = (lse.new_zeros(*everything, sizes.width(name)) if backward else None for name in ("k", "v"))
    # Bounds the memory of the scores, whatever the length.
    at_once = max(PAIRS_AT_ONCE // sizes.tokens, 1)
    for head in range(sizes.query_heads):
        shared = head // group
        k, v = (_read(source, name, shared, np.arange(sizes.tokens)) for name in ("k", "v"))
        for first in range(0, count, at_once):
            part = slice(first, first + at_once)
            q = _read(source, "q", head, rows[part])
            weights, lse[:, head, part] = _weights(pattern, q, k, rows[part], head, source, scale)
            out[:, head, part] = weights @ v
            if dq is not None and dk is not None and dv is not None:
                grad = _read(source, "grad_out", head, rows[part])
                delta = (grad * out[:, head, part]).sum(-1, keepdim=True)
                ds = weights * (grad @ v.mT - delta) * scale
                dq[:, head, part] = ds @ k
                dk[:, shared] += ds.mT @ q
                dv[:, shared] += weights.mT @ grad
    return Exact(out, lse, dq, dk, dv)


def _weights(
    pattern: Pattern, q: Tensor, k: Tensor, rows: IntArray, head: int, source: Source, scale: float
) -> tuple[Tensor, Tensor]:
    """Return softmax weights [B, n, T] and lse [B, n] of one head's rows."""
    sizes = source.geometry
    columns = np.arange(sizes.tokens)[None, :]
    counts = pattern.multiplicity(head, sizes.query_heads, sizes.kv_heads, rows[:, None], columns)
    scores = q @ k.mT
    scores.mul_(scale).add_(torch.from_numpy(counts).double().log_())
    lse = torch.logsumexp(scores, dim=-1)
    # A row that sees no key has lse -inf: clamped, its weights are 0 and not NaN.
    weights = scores.sub_(lse.clamp_min(torch.finfo(torch.float64).min).unsqueeze(-1)).exp_()
    return weights, lse


def _read(source: Source, name: str, head: int, positions: IntArray) -> Tensor:
    """Return one head at some positions, float64 [B, n, D]."""
    sizes = source.geometry
    x = torch.empty(sizes.batch, 1, len(positions), sizes.width(name), dtype=sizes.dtype)
    runs = np.stack([positions, np.ones_like(positions), np.ones_like(positions)], axis=1)
    source.fill(name, slice(head, head + 1), runs, x)
    return x[:, 0].double()
