"""Run virtual ranks whose shards are larger than memory, block by block.

Owns the order of work of one such rank and the gradients that wait for other ranks. Ranks are computed by the
production `RingPass`: once for the tokens of other shards, and once for each block of queries
(`blocks.py`). One head, float32 or float64, contiguous shards. Legend: n slots, D head dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ds_ring.comm.messages import TokenRange
from ds_ring.errors import RingShapeError
from ds_ring.kernels.select import Kernel
from ds_ring.masks.pattern import Pattern
from ds_ring.masks.slots import IntArray, expand_ranges, progressions_at
from ds_ring.ring.merge import merge_
from ds_ring.ring.ring_pass import RingPass
from ds_ring.schedule.layout import Layout, expand_runs
from ds_ring.schedule.rank_plan import RankPlan
from ds_ring.simulation.rank import Source, VirtualExchange, put_rows
from streamed.blocks import BlockPlanner, LocalQueries
from streamed.numbers import read


class StreamedPart(NamedTuple):
    """Hold some of a rank's results, of the tokens at `runs`; [1, 1, n, D], the lse [1, 1, n].

    A tensor that is None is not in this part. Parts of dq add up: what other shards contribute comes last.
    """

    runs: IntArray
    out: Tensor | None = None
    lse: Tensor | None = None
    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None


class _Rows(NamedTuple):
    """Hold the queries that read other shards, packed: q, then their global results and gradient."""

    slots: IntArray
    q: Tensor
    out: Tensor
    lse: Tensor
    grad: Tensor


class PendingGradients:
    """Keep dK and dV of shards that were not computed yet: few tokens each, by origin and position."""

    def __init__(self, head_dim: int) -> None:
        self.head_dim = head_dim
        self._of: dict[int, dict[int, np.ndarray]] = {}

    def add(self, what: str, tokens: TokenRange, runs: IntArray, part: Tensor) -> None:
        """Add gradients: an `AddGradients`."""
        rows = self._of.setdefault(tokens.origin, {})
        side = 0 if what == "dK" else 1
        values = part[0, 0].numpy()
        for position, value in zip(expand_runs(runs).tolist(), values, strict=True):
            if position not in rows:
                rows[position] = np.zeros((2, self.head_dim), dtype=values.dtype)
            rows[position][side] += value

    def take(self, origin: int) -> tuple[IntArray, np.ndarray]:
        """Return and drop the gradients of a shard: positions [m], values [m, 2, D]."""
        return _table(self._of.pop(origin, {}), self.head_dim)

    def table(self) -> tuple[IntArray, np.ndarray]:
        """Return all that is kept."""
        return _table({p: v for rows in self._of.values() for p, v in rows.items()}, self.head_dim)

    def restore(self, positions: IntArray, values: np.ndarray, local_tokens: int) -> None:
        """Restore what `table` returned, for shards of so many tokens."""
        for position, value in zip(positions.tolist(), values, strict=True):
            self._of.setdefault(position // local_tokens, {})[position] = value.copy()


def _table(rows: dict[int, np.ndarray], head_dim: int) -> tuple[IntArray, np.ndarray]:
    positions = np.array(sorted(rows), dtype=np.int64)
    values = [rows[position] for position in positions.tolist()]
    return positions, np.stack(values) if values else np.zeros((0, 2, head_dim), dtype=np.float32)


@dataclass
class StreamedRanks:
    """Run ranks one at a time; the attributes are what all of them share.

    Raises:
        RingShapeError: more than one head or batch entry, or a dtype below float32.
        RingLayoutError: another layout.
    """

    source: Source  # all tokens; one head
    pattern: Pattern  # what attends to what; bound to that head here
    layout: Layout  # contiguous shards
    kernel: Kernel  # computes
    scale: float  # of the scores
    query_block: int = 1 << 16  # queries of a block
    planner: BlockPlanner = field(init=False, repr=False)

    def __post_init__(self) -> None:
        sizes = self.source.geometry
        if (sizes.batch, sizes.query_heads, sizes.kv_heads) != (1, 1, 1):
            raise RingShapeError(f"streamed ranks: expected one batch entry and one head, got {sizes}")
        if sizes.dtype not in (torch.float32, torch.float64):
            raise RingShapeError.wrong("streamed ranks", "float32 or float64", f"{sizes.dtype}", "convert it")
        self.planner = BlockPlanner(self.pattern.bind((0,), 1, 1), self.layout)

    @torch.no_grad()
    def forward(self, ring_rank: int) -> Iterator[StreamedPart]:
        """Yield a rank's out and lse, block by block."""
        yield from self._parts(ring_rank, None)

    @torch.no_grad()
    def forward_and_backward(self, ring_rank: int, pending: PendingGradients) -> Iterator[StreamedPart]:
        """Yield a rank's results and gradients, with what `pending` has for it."""
        yield from self._parts(ring_rank, pending)

    def _parts(self, ring_rank: int, pending: PendingGradients | None) -> Iterator[StreamedPart]:
        remote = self.planner.remote(ring_rank)
        runs = self.layout.runs(ring_rank)
        slots = expand_ranges(remote.queries)
        q = self._filled("q", progressions_at(runs, remote.queries))
        add = None if pending is None else pending.add
        away = self._pass(remote.plan, VirtualExchange(self.source, self.layout, add))
        none = q[:, :, :0]
        out, lse = away.forward(q, none, none)
        rows = _Rows(slots, q, out, lse, torch.zeros_like(q))
        dk = dv = None
        if pending is not None:
            dk, dv = (torch.zeros(1, 1, int(runs[0, 2]), q.shape[3], dtype=q.dtype) for _ in range(2))
        for first in range(0, int(runs[0, 2]), self.query_block):
            yield self._block(ring_rank, first, rows, dk, dv)
        if pending is not None and dk is not None and dv is not None:
            dq, *_ = away.backward(rows.grad, q, none, none, rows.out, rows.lse)
            yield StreamedPart(progressions_at(runs, remote.queries), dq=dq)
            positions, owed = pending.take(ring_rank)
            index = torch.from_numpy(positions - runs[0, 0])
            for total, side in ((dk, 0), (dv, 1)):
                total.index_add_(2, index, torch.from_numpy(owed[None, None, :, side].astype(owed.dtype)))
            for first in range(0, dk.shape[2], self.query_block):
                part = slice(first, first + self.query_block)
                here = progressions_at(runs, np.array([[first, min(part.stop, dk.shape[2])]]))
                yield StreamedPart(here, dk=dk[:, :, part], dv=dv[:, :, part])

    def _block(
        self, ring_rank: int, first: int, rows: _Rows, dk: Tensor | None, dv: Tensor | None
    ) -> StreamedPart:
        """Attend one block of queries; add its part to `rows`, dk and dv."""
        block: LocalQueries = self.planner.block(ring_rank, first, self.query_block)
        own = self.layout.runs(ring_rank)
        runs = progressions_at(own, np.array([[first, first + block.length]]))
        keys = progressions_at(own, block.held)
        q, k, v = self._filled("q", runs), self._filled("k", keys), self._filled("v", keys)
        here = self._pass(block.plan, None)
        out, lse = here.forward(q, k, v)
        low, high = np.searchsorted(rows.slots, [first, first + block.length]).tolist()
        index, mine = torch.from_numpy(rows.slots[low:high] - first), slice(low, high)
        if low < high:  # merge what they saw elsewhere into what they saw here
            merge_(rows.out[:, :, mine], rows.lse[:, :, mine], out[:, :, index], lse[:, :, index])
            out.index_copy_(2, index, rows.out[:, :, mine])
            lse.index_copy_(2, index, rows.lse[:, :, mine])
        if dk is None or dv is None:
            return StreamedPart(runs, out, lse)
        grad = self._filled("grad_out", runs)
        rows.grad[:, :, mine] = grad[:, :, index]
        dq, dk_part, dv_part = here.backward(grad, q, k, v, out, lse)
        there = np.stack([block.held[:, 0], np.ones(len(block.held), int), np.diff(block.held)[:, 0]], axis=1)
        put_rows(dk, there, dk_part, add=True)
        put_rows(dv, there, dv_part, add=True)
        return StreamedPart(runs, out, lse, dq)

    def _pass(self, plan: RankPlan, exchange: VirtualExchange | None) -> RingPass:
        return RingPass(plan, self.kernel, exchange, self.scale)

    def _filled(self, name: str, runs: IntArray) -> Tensor:
        """Return tokens of a tensor at some positions, [1, 1, n, D]."""
        return read(self.source, name, runs)[None, None]
