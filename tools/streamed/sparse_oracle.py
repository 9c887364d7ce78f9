"""Compute rows of dilated attention in float64 by the definition, for sequences that no dense row fits.

Owns an enumeration of the keys of a query (and the queries of a key) straight from the words of the
definition: branch i holds the positions p with (p mod w_i) mod r_i = o_i, segment by segment. No tiles, no
plans.
Legend: n keys, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ds_ring.masks.slots import IntArray
from ds_ring.patterns.dilated.pattern import Dilated
from ds_ring.simulation.rank import Source
from streamed.numbers import read, runs_at


class ExactRow(NamedTuple):
    """Hold attention of one query, float64: out [D], lse, its keys [n] and their weights [n]."""

    out: Tensor
    lse: float
    keys: IntArray
    weights: Tensor


@dataclass(frozen=True)
class SparseOracle:
    """Compute float64 results of single positions; one head."""

    source: Source  # q, k, v, grad_out
    pattern: Dilated  # dilated, causal
    scale: float  # of the scores

    def row(self, position: int) -> ExactRow:
        """Return a query's result; out 0 and lse -inf if it sees no key."""
        keys, times = self._partners(position, after=False)
        if not len(keys):
            return ExactRow(
                torch.zeros(self.source.geometry.head_dim).double(), -torch.inf, keys, torch.empty(0)
            )
        q, k, v = self._read("q", np.array([position])), self._read("k", keys), self._read("v", keys)
        scores = (k @ q[0]) * self.scale + torch.from_numpy(times).double().log()
        lse = torch.logsumexp(scores, dim=0)
        weights = (scores - lse).exp()
        return ExactRow(weights @ v, float(lse), keys, weights)

    def query_gradient(self, position: int) -> Tensor:
        """Return dq of one position, [D]."""
        row, grad = self.row(position), self._read("grad_out", np.array([position]))[0]
        ds = row.weights * (self._read("v", row.keys) @ grad - grad @ row.out)
        return ds @ self._read("k", row.keys) * self.scale

    def key_gradients(self, position: int) -> tuple[Tensor, Tensor]:
        """Return dk and dv of one position, [D] each, over all queries that see it."""
        queries, _ = self._partners(position, after=True)
        value = self._read("v", np.array([position]))[0]
        dk, dv = torch.zeros_like(value), torch.zeros_like(value)
        for query in queries.tolist():
            row, grad = self.row(query), self._read("grad_out", np.array([query]))[0]
            weight = row.weights[int(np.searchsorted(row.keys, position))]
            dv += weight * grad
            dk += (
                weight * (grad @ value - grad @ row.out) * self._read("q", np.array([query]))[0] * self.scale
            )
        return dk, dv

    def _partners(self, position: int, after: bool) -> tuple[IntArray, IntArray]:
        """Return keys of a query, or (`after`) queries of a key, and in how many branches they meet."""
        tokens, found = self.source.geometry.tokens, []
        branches = zip(
            self.pattern.segment_lengths,
            self.pattern.dilation_rates,
            self.pattern.offsets(0, 1, 1),
            strict=True,
        )
        for length, rate, offset in branches:
            if position % length % rate != offset:
                continue
            start = position // length * length
            end = min(start + length, tokens)
            members = np.arange(start + offset, end, rate)
            found.append(members[members >= position] if after else members[members <= position])
        if not found:
            return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
        return np.unique(np.concatenate(found), return_counts=True)

    def _read(self, name: str, positions: IntArray) -> Tensor:
        return read(self.source, name, runs_at(positions)).double()
