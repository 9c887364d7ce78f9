"""Dilated attention: its definition, and Microsoft's mixture of branches.

Two oracles in float64, written without ds_ring: loops over segments, nothing clever. The mixture is LongNet's
(Ding et al. 2023, equations 9 to 11): each branch gathers the tokens of a segment, attends to them by a
softmax of its own, scatters the result back, and branches are weighted by their softmax denominators.
torchscale detaches those weights from the gradient; the mathematics does not, and nor does this.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

RULES = ("paper", "paper_kv", "torchscale", "zero")


@dataclass(frozen=True)
class Branches:
    """A dilated pattern in the words of the definition."""

    segment_lengths: tuple[int, ...]
    dilation_rates: tuple[int, ...]
    causal: bool = True
    rule: str = "paper"

    def offset(self, head: int, branch: int, query_heads: int, kv_heads: int) -> int:
        """o(h, i)."""
        rate = self.dilation_rates[branch]
        if self.rule == "paper":
            return head % rate
        if self.rule == "paper_kv":
            return (head * kv_heads // query_heads) % rate
        if self.rule == "torchscale":
            return head // ((query_heads + rate - 1) // rate)
        assert self.rule == "zero"
        return 0

    def members(
        self, head: int, branch: int, query_heads: int, kv_heads: int, tokens: int
    ) -> list[list[int]]:
        """For each segment of a branch, the positions that take part."""
        length, rate = self.segment_lengths[branch], self.dilation_rates[branch]
        offset = self.offset(head, branch, query_heads, kv_heads)
        found = []
        for start in range(0, tokens, length):
            segment = range(start, min(start + length, tokens))
            found.append([p for p in segment if (p - start) % rate == offset])
        return found

    def multiplicity(self, head: int, query_heads: int, kv_heads: int, tokens: int) -> np.ndarray:
        """m of every (query, key) pair of a head; int64 [tokens, tokens]."""
        return _multiplicity(self, head, query_heads, kv_heads, tokens)


@lru_cache(maxsize=64)
def _multiplicity(branches: Branches, head: int, query_heads: int, kv_heads: int, tokens: int) -> np.ndarray:
    count = np.zeros((tokens, tokens), dtype=np.int64)
    for branch in range(len(branches.segment_lengths)):
        for inside in branches.members(head, branch, query_heads, kv_heads, tokens):
            count[np.ix_(inside, inside)] += 1
    return np.tril(count) if branches.causal else count


def _attend(q: Tensor, k: Tensor, v: Tensor, log_m: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax attention with an additive term; rows without keys have out 0 and lse -inf."""
    scores = q @ k.mT / q.shape[-1] ** 0.5 + log_m
    lse = torch.logsumexp(scores, dim=-1)
    sees = (log_m > -torch.inf).any(-1, keepdim=True)
    weights = torch.softmax(torch.where(sees, scores, 0.0), dim=-1)
    return torch.where(sees, weights, 0.0) @ v, lse


def one_softmax(q: Tensor, k: Tensor, v: Tensor, branches: Branches) -> tuple[Tensor, Tensor]:
    """The definition: one softmax over all keys with log m added. [B, H, T, D] over [B, G, T, D]."""
    heads, kv_heads, tokens = q.shape[1], k.shape[1], q.shape[2]
    counts = [branches.multiplicity(head, heads, kv_heads, tokens) for head in range(heads)]
    log_m = torch.from_numpy(np.stack(counts)).double().log()
    group = heads // kv_heads
    return _attend(q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), log_m)


def mixture(q: Tensor, k: Tensor, v: Tensor, branches: Branches) -> tuple[Tensor, Tensor]:
    """Microsoft's formulation: a softmax for each branch, mixed by the softmax denominators."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    per_branch = [
        _one_branch(q, k, v, branches, i, k.shape[1] // group) for i in range(len(branches.segment_lengths))
    ]
    outs, lses = (torch.stack(parts) for parts in zip(*per_branch, strict=True))
    total = torch.logsumexp(lses, dim=0)
    covered = total > -torch.inf
    weights = torch.where(covered, lses - torch.where(covered, total, 0.0), -torch.inf).exp()
    return (weights.unsqueeze(-1) * outs).sum(0), total


def _one_branch(
    q: Tensor, k: Tensor, v: Tensor, branches: Branches, branch: int, kv_heads: int
) -> tuple[Tensor, Tensor]:
    heads, tokens = q.shape[1], q.shape[2]
    outs, lses = [], []
    for head in range(heads):
        out = torch.zeros_like(q[:, head])
        lse = torch.full_like(q[:, head, :, 0], -torch.inf)
        for inside in branches.members(head, branch, heads, kv_heads, tokens):
            if not inside:
                continue
            at = torch.tensor(inside)
            hidden = torch.zeros(len(inside), len(inside), dtype=q.dtype)
            if branches.causal:
                hidden = hidden.masked_fill(torch.ones_like(hidden).triu(1).bool(), -torch.inf)
            part, part_lse = _attend(*(x[:, head, at] for x in (q, k, v)), hidden)
            out, lse = out.index_copy(1, at, part), lse.index_copy(1, at, part_lse)
        outs.append(out)
        lses.append(lse)
    return torch.stack(outs, 1), torch.stack(lses, 1)
