"""Run `transport="tiles"`: exchange, compute and merge as `grid.py` and `plan.py` say.

Heads go in chunks, one after the other: of the tokens of a row or a column, a rank holds those of a few
heads. README.md has the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ds_ring.comm.device_tables import on_device
from ds_ring.comm.exchange import Exchange
from ds_ring.comm.in_flight import Pending
from ds_ring.kernels.interface import ALL_HEADS, Kernel, Operands, Rows, value_dim
from ds_ring.masks.slots import SlotRanges, count_slots, expand_ranges
from ds_ring.masks.tiles import Tiles
from ds_ring.ops.context import RingContext
from ds_ring.ops.prepare import Prepared
from ds_ring.ring.accumulator import Accumulator, check_parts_wait
from ds_ring.ring.merge import get_accumulator_dtype
from ds_ring.schedule.lowering import get_query_heads, head_bytes, split_heads
from ds_ring.transports.tiles.grid import ALL, PassGrid, list_steps
from ds_ring.transports.tiles.pieces import FEW_RANGES, GridSide, StepMessages, add_at, rows
from ds_ring.transports.tiles.plan import GridPlan, RankGrid, TokenBytes, choose_grid, tile_plan


def make_pass(
    context: RingContext,
    prepared: Prepared,
    operands: Operands,
    finish_header_check: Callable[[], None] | None,
) -> GridPass:
    """Return the pass of a context, on the grid whose messages have the fewest bytes."""
    mesh, plan = context.mesh, prepared.plan
    nodes = mesh.grid.ring_ranks_per_node(mesh.global_rank, mesh.ranks_per_node) or 0
    shape = plan.pattern, plan.layout, plan.query_heads, plan.kv_heads
    return pass_on(choose_grid(*shape, token_bytes(prepared.kernel, operands), nodes), context, prepared)


def pass_on(grid: PassGrid, context: RingContext, prepared: Prepared) -> GridPass:
    """Return the pass of a context on a grid."""
    plan = prepared.plan
    tiles = tile_plan(plan.pattern, plan.layout, plan.query_heads, plan.kv_heads, grid)
    settings = prepared.kernel, context.exchange, prepared.scale, prepared.chunk_bytes
    return GridPass(tiles, context.mesh.ring_rank, *settings)


def token_bytes(kernel: Kernel, operands: Operands) -> TokenBytes:
    """Return the bytes of a token in the messages of a pass over these operands."""
    q, _, v, grad_out, has_grad_lse = operands
    sizes = q.element_size(), get_accumulator_dtype(q.dtype).itemsize
    return TokenBytes.for_pass(
        grad_out is not None, q.shape[-1], value_dim(kernel, v), *sizes, lses=1 + has_grad_lse
    )


@dataclass(frozen=True)
class GridPass:
    """The inputs of both passes; see `RingPass` for the shapes."""

    plan: GridPlan
    ring_rank: int
    kernel: Kernel
    exchange: Exchange | None
    scale: float
    chunk_bytes: int = 1 << 20

    @torch.no_grad()
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Run the forward pass; same contract as `RingPass.forward`."""
        out = q.new_empty((*q.shape[:-1], value_dim(self.kernel, v)))
        lse = q.new_empty(q.shape[:-1], dtype=get_accumulator_dtype(q.dtype))
        for tiles, heads, kv in self._chunks(k, v):
            kernel = self.kernel.select_heads(heads)
            total = _merged(kernel, out[:, heads], lse[:, heads])
            self._forward(
                tiles, kernel, q[:, heads], k[:, kv], v[:, kv], total, (out[:, heads], lse[:, heads])
            )
        return out, lse

    def _forward(
        self, tiles: RankGrid, kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, total: Accumulator,
        results: Sequence[Tensor],
    ) -> None:  # fmt: skip
        """Run the forward pass of a head chunk: `total` merges its results."""
        queries, keys = self._sides(tiles, ("Q",), [q], [k, v], keys_stay=True)
        like = [x.movedim(2, 0) for x in results]
        partial_results: dict[int, list[Tensor]] = {}  # of other ranks' queries, by distance
        steps = list_steps(self.plan.grid, backward=False)
        for number, step in enumerate(steps):
            batch = StepMessages()
            queries.arrive(batch, step.queries_in)
            keys.arrive(batch, step.keys_in)
            returned = queries.give_back(batch, step.queries_back, ("out", "lse"), partial_results, like)
            pending = self._post(batch, number)
            if step.block is not None:
                here, target = step.block.query, total
                if here:
                    partial_results[here] = [rows(x, queries.counts[here]) for x in like]
                    target = _merged(kernel, *(x.movedim(0, 2) for x in partial_results[here]))
                operands = *queries.views(here), *keys.views(step.block.key)
                self._attend(kernel, operands, tiles.make_block_tiles(step.block), target)
                if here:
                    target.finish()
                    queries.drop([here])
            if pending is not None:
                pending.wait()
            for slots, parts in returned:
                _merge_at(total, slots, *parts)
            for distance in step.queries_back:
                del partial_results[distance]
        total.finish()

    def _attend(self, kernel: Kernel, operands: Sequence[Tensor], tiles: Tiles, total: Accumulator) -> None:
        if total.waiting:
            total.make_room()
        if len(tiles):
            q, k, v = operands
            for part in kernel.forward(q, k, v, tiles, self.scale):
                total.add(part.q_rows, part.heads, part.out_BHSD, part.lse_BHS)
                del part  # else it stays alive while the kernel computes the next one

    @torch.no_grad()
    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        grad_lse: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Return the gradients; same contract as `RingPass.backward`."""
        dq, dk, dv = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        query_rows = [grad_out, q, out, lse, *(() if grad_lse is None else (grad_lse.to(lse.dtype),))]
        for tiles, heads, kv in self._chunks(k, v):
            of_queries, of_keys = [x[:, heads] for x in query_rows], [x[:, kv] for x in (k, v)]
            gradients = self._backward(tiles, self.kernel.select_heads(heads), of_queries, of_keys)
            for to, x in zip((dq[:, heads], dk[:, kv], dv[:, kv]), gradients, strict=True):
                to[:, :, : len(x)] = x.movedim(0, 2)
        return dq, dk, dv

    def _backward(
        self, tiles: RankGrid, kernel: Kernel, query_rows: Sequence[Tensor], kv: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """Return dq, dk and dv of the own tokens of a head chunk, [valid, B, heads, ...].

        `query_rows`: grad_out, q, out, lse, and grad_lse if there is one; `kv`: k and v.
        """
        names, dtype = ("dO", "Q", "out", "lse", "lse's gradient")[: len(query_rows)], query_rows[3].dtype
        queries, keys = self._sides(tiles, names, query_rows, kv, keys_stay=False)
        like_q, *like_kv = (rows(x.movedim(2, 0), 0, dtype) for x in (query_rows[1], *kv))
        sums_of_q = rows(like_q, sum(queries.counts)).zero_()
        dq = {ALL: [sums_of_q]} | {at: [x] for at, x in enumerate(sums_of_q.split(queries.counts))}
        dkv: dict[int, list[Tensor]] = {}  # by distance, as dq
        steps = list_steps(self.plan.grid, backward=True)
        for number, step in enumerate(steps):
            batch = StepMessages()
            queries.arrive(batch, step.queries_in)
            keys.arrive(batch, step.keys_in)
            of_queries = queries.give_back(batch, step.queries_back, ("dQ",), dq, [like_q])
            of_keys = keys.give_back(batch, step.keys_back, ("dK", "dV"), dkv, like_kv)
            pending = self._post(batch, number)
            if step.block is not None:
                i, j = step.block.query, step.block.key
                if j not in dkv:
                    dkv[j] = [rows(x, keys.counts[j]).zero_() for x in like_kv]
                self._differentiate(
                    kernel,
                    queries.views(i),
                    keys.views(j),
                    tiles.make_block_tiles(step.block),
                    (*dq[i], *dkv[j]),
                )
                if j and j in steps[number + 1].keys_back:
                    keys.drop([j])
            if pending is not None:
                pending.wait()
            for total, returned in ((dq[0], of_queries), (dkv.get(0, ()), of_keys)):
                for slots, parts in returned:
                    for target, part in zip(total, parts, strict=True):
                        add_at(target, slots, part)
            for distance in step.keys_back:
                del dkv[distance]
        return *dq[0], *dkv[0]

    def _differentiate(
        self, kernel: Kernel, queries: Sequence[Tensor], keys: Sequence[Tensor], tiles: Tiles,
        totals: Sequence[Tensor],
    ) -> None:  # fmt: skip
        """Add the gradients of a block to sums [n, B, heads, ...] of dq, dk and dv."""
        if len(tiles):
            (grad_out, q, out, lse, *rest), (k, v) = queries, keys
            grad_lse = rest[0] if rest else None
            targets = [x.movedim(0, 2) for x in totals]
            inputs = (grad_out, q, k, v, out, lse, tiles, self.scale, grad_lse)
            for part in kernel.backward(*inputs):
                part.add_to(*targets)
                del part

    def _chunks(self, k: Tensor, v: Tensor) -> Iterator[tuple[RankGrid, slice, slice]]:
        """Yield what each chunk of heads does: its tiles, query heads and K/V heads."""
        for number, (kv_heads, _) in enumerate(self.plan.classes):
            for kv in split_heads(kv_heads, head_bytes(k, v), self.chunk_bytes):
                yield self.plan.tiles(number, self.ring_rank), get_query_heads(kv, self.plan.group), kv

    def _sides(
        self, tiles: RankGrid, names: Sequence[str], of_queries: Sequence[Tensor], kv: Sequence[Tensor],
        keys_stay: bool,
    ) -> tuple[GridSide, GridSide]:  # fmt: skip
        """Return queries and keys of a chunk: those that stay in one buffer, and those that pass through."""
        valid, grid = count_slots(tiles.queries[0]), self.plan.grid
        q_own, k_own = ([x[:, :, :valid] for x in side] for side in (of_queries, kv))
        at_q, at_k = (partial(where, self.ring_rank) for where in (grid.in_row, grid.in_column))
        return (
            GridSide(q_own, names, tiles.queries, tiles.query_readers, at_q, not keys_stay),
            GridSide(k_own, ("K", "V"), tiles.keys, tiles.key_readers, at_k, keys_stay),
        )

    def _post(self, batch: StepMessages, number: int) -> Pending | None:
        if not batch.sends and not batch.receives:
            return None
        assert self.exchange is not None, "messages on a ring of one"
        return self.exchange.post(batch.sends, batch.receives, number)


def _merged(kernel: Kernel, out: Tensor, lse: Tensor) -> Accumulator:
    """Return what merges partial results into out and lse."""
    waits = check_parts_wait(kernel, out.dtype, lse.dtype)
    return Accumulator(lambda: (out,), out, [out.shape], lse.dtype, lse, waits)


def _merge_at(total: Accumulator, slots: SlotRanges, out: Tensor, lse: Tensor) -> None:
    """Merge partial results [n, B, heads, ...] of some slots."""
    pieces = slots.tolist()
    if len(pieces) > FEW_RANGES:  # as one part, whose other rows see no key
        first, end = pieces[0][0], pieces[-1][1]
        index = on_device(expand_ranges(slots - first), out.device)
        out = rows(out, end - first).zero_().index_copy_(0, index, out)
        lse = rows(lse, end - first).fill_(float("-inf")).index_copy_(0, index, lse)
        pieces = [[first, end]]
    at = 0
    for start, end in pieces:
        here = (x[at : at + end - start].movedim(0, 2) for x in (out, lse))
        total.add(Rows(start, 1, end - start), ALL_HEADS, *here)
        at += end - start
