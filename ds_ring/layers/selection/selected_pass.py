"""Both passes of attention over chosen keys: each rank asks the owners for the rows that its queries chose.

Rows of one owner are here at a time; gradients of rows return to their owner. A rank holds the shards of two
ranks at a time and a few bytes for each position, so memory is O(T / P).

[Note: what a query block reads]
Neighbouring queries choose similar keys. So a block of queries attends to the union of the rows that
its queries chose, by one matrix product under a boolean mask of the pairs that were chosen. A gather of k
rows for each query would take k times the memory. Neighbouring blocks are one batch, as many as `WORKSPACE`
holds and as their unions are similar in size.

[Note: one wait]
Only the device knows how many rows of a shard a block chose. The host reads these numbers once a pass,
together with the numbers of rows that other ranks ask for. So it knows the sizes of all messages and batches
before the first hop, and indices stay on the device.

Shapes: B samples, C choices (heads that choose for themselves), H query heads, G key/value heads, S local
tokens, Q local queries, D and E head dims of keys and values, N = B * C, g = G / C, P ranks, R chosen rows of
one owner, n blocks of a batch, U rows of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from ds_ring.comm.device_tables import leave_inference_mode, on_device, stream_key, to_host
from ds_ring.comm.mesh import RingMesh
from ds_ring.kernels.reference import compute_weights
from ds_ring.ops.context import RingContext
from ds_ring.ring.merge import get_accumulator_dtype, make_empty_results, merge_
from ds_ring.schedule.layout import Layout
from ds_ring.transports.owner_walk import walk_owners

BLOCK = 32  # queries of a block; see [Note: what a query block reads]
WORKSPACE = {"cpu": 4 << 20, "cuda": 2 << 30}  # bytes of a batch: indices, rows and scores
SEGMENT = 2048  # slots of a shard that are taken at once at least
PADDED = 1.5  # the rows of a batch over those that its blocks chose, at most


class HopRows(NamedTuple):
    """Chosen rows of one owner's K and V, of all items, one item after the other."""

    owner: int
    number: Tensor  # int64 [N * S + 1]: the row of each slot that was chosen; any row for others
    k: Tensor  # [g, R, D]
    v: Tensor  # [g, R, E]


class ChosenRows(NamedTuple):
    """Blocks of queries of one item, and the rows of a hop that each of them chose."""

    where: tuple[slice, slice, slice]  # sample, query heads, query slots
    rows: Tensor  # int64 [n * U], indices into the rows of the hop
    hidden: Tensor  # bool [n, queries of a block, U]: not chosen; so are the rows that fill a block up


class SelectedPass:
    """Attend to the chosen rows of one owner after the other: at hop s to those of rank p - s."""

    def __init__(
        self, context: RingContext, q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, block: int,
        is_backward: bool = False,
    ) -> None:  # fmt: skip
        mesh, layout = context.mesh, context.layout_for(0, q.device.type)
        self.exchange, self.size, self.rank = context.exchange, mesh.ring_size, mesh.ring_rank
        self.scale = q.shape[-1] ** -0.5 if context.options.scale is None else context.options.scale
        self.choices = 1 if chosen.dim() == 3 else chosen.shape[1]
        self.slots, self.dtype = layout.local_tokens, get_accumulator_dtype(q.dtype)
        self.chosen, self.block = chosen.reshape(-1, *chosen.shape[-2:]), block
        self.table = _places_by_position(layout, stream_key(q.device))
        positions = on_device(layout.positions(self.rank), q.device)
        self.last = positions.repeat_interleave(max(1, chosen.shape[-2] // self.slots))  # [Q], for blocks
        self.q, self.k, self.v = q, self._by_token(k), self._by_token(v)
        # Bytes of a block: of its indices, and of each row: K, V and scores, backward also their gradients.
        self.workspace, element = WORKSPACE[q.device.type], self.dtype.itemsize
        self.block_bytes = 24 * BLOCK * block * chosen.shape[-1] + 9 * self.slots
        self.row_bytes = len(self.k) * (k.shape[-1] + v.shape[-1]) * (k.itemsize + element)
        self.row_bytes = (1 + is_backward) * (
            self.row_bytes + 2 * element * BLOCK * q.shape[1] // self.choices
        )
        # A shard is taken in segments, all of whose rows fit into the workspace.
        self.segment = min(self.slots, max(SEGMENT, self.workspace // self.row_bytes))
        self._exchange_rows(mesh)

    def _by_token(self, x_BGSD: Tensor) -> Tensor:
        """Return [g, N * S, D]."""
        return x_BGSD.unflatten(1, (self.choices, -1)).movedim(2, 0).flatten(1, 3)

    def _places(self, table: Tensor, items: int | slice, queries: slice) -> Tensor:
        """Return what a table [T + 1] has for each chosen key of some queries, [.., queries, k * block]."""
        tokens = self.chosen[items, queries]
        if self.block > 1:
            firsts = tokens.unsqueeze(-1)
            tokens = firsts + torch.arange(self.block, device=tokens.device)
            hidden = (firsts < 0) | (tokens > self.last[queries, None, None])
            tokens = tokens.masked_fill(hidden, -1).flatten(-2)
        return table[tokens]  # -1 is looked up at the end

    def _exchange_rows(self, mesh: RingMesh) -> None:
        """Find the rows that blocks chose, tell their owners, and read the numbers: [Note: one wait]."""
        items, queries = self.chosen.shape[:2]
        wanted = self.chosen.new_zeros((items, self.size, self.slots), dtype=torch.bool)
        unions, full = [], queries // BLOCK * BLOCK
        step = max(1, self.workspace // (items * (self.block_bytes + self.size * self.slots))) * BLOCK
        firsts = [*range(0, full, step), *[full] * (full < queries)]
        for first, end in zip(firsts, [*firsts[1:], queries], strict=True):
            blocks = max(1, (end - first) // BLOCK)
            places = self._places(self.table, slice(None), slice(first, end)).reshape(items, blocks, -1)
            used = places.new_zeros((items, blocks, self.size * self.slots + 1), dtype=torch.bool)
            used = used.scatter_(2, places, True)[..., :-1].unflatten(2, (self.size, self.slots))
            wanted |= used.any(1)
            used = pad(used, (0, -self.slots % self.segment))
            unions.append(used.unflatten(3, (-1, self.segment)).sum(-1))
        # As bits, uint8 [P, N, ceil(S / 8)]: the rows that this rank wants of each rank, and the reverse.
        bits = pad(wanted.transpose(0, 1).to(torch.uint8), (0, -self.slots % 8)).unflatten(2, (-1, 8))
        shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
        self.wanted = self.asked = (bits << shifts).sum(-1, dtype=torch.uint8)
        if self.exchange is not None:
            self.asked = torch.stack(self.exchange.all_to_all(list(self.wanted), mesh.ring_group))
        # Slots of padding, which chose nothing, come last.
        choosing = (self.chosen >= 0).any(-1).any(0) * torch.arange(1, queries + 1, device=bits.device)
        numbers = [wanted.sum((0, 2)), self._chosen_rows(self.asked).sum(1), torch.cat(unions, 1).flatten()]
        host_numbers = to_host(torch.cat([choosing.amax().view(1), *numbers]))
        self.queries, counts = int(host_numbers[0]), host_numbers[1 : 2 * self.size + 1].tolist()
        self.count_wanted, self.count_asked = counts[: self.size], counts[self.size :]
        self.unions = host_numbers[2 * self.size + 1 :].reshape(
            items, -1, self.size, -(-self.slots // self.segment)
        )

    def _chosen_rows(self, bits: Tensor) -> Tensor:
        """Return whether each slot of all items is among some rows, bool [.., N * S]."""
        shifted = bits.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=bits.device)
        return (shifted & 1).flatten(-2)[..., : self.slots].flatten(-2).bool()

    def walk(
        self, compute: Callable[[HopRows], Sequence[Tensor]],
        add: Callable[[Tensor, Sequence[Tensor]], None] | None = None,
    ) -> None:  # fmt: skip
        """Call `compute` with the rows of each hop, while those of the next one travel.

        If there is `add`, what `compute` returns (gradients of K's and V's rows) returns to the owner, and
        `add` gets what others return for rows of this rank, with their index; in the order of hops.
        """
        kv, rows_by_reader = (self.k, self.v), {}  # rows of this rank's shard, by the rank that reads them

        def index(reader: int) -> Tensor:
            if reader not in rows_by_reader:
                rows_by_reader[reader] = _first_true(
                    self._chosen_rows(self.asked[reader]).cumsum(0), self.count_asked[reader]
                )
            return rows_by_reader[reader]

        def sent_to(reader: int) -> Sequence[Tensor]:
            return [x.index_select(1, index(reader)) for x in kv]

        def received_from(owner: int) -> Sequence[Tensor]:
            return [x.new_empty((len(x), self.count_wanted[owner], x.shape[2])) for x in kv]

        def returned_by(reader: int) -> Sequence[Tensor]:
            count = self.count_asked[reader]
            return [x.new_empty((len(x), count, x.shape[2]), dtype=self.dtype) for x in kv]

        def computed(owner: int, rows: Sequence[Tensor]) -> Sequence[Tensor]:
            number = self._chosen_rows(self.wanted[owner]).cumsum(0).sub_(1).clamp_min_(0)
            return compute(HopRows(owner, pad(number, (0, 1)), *rows))

        def returned(reader: int, gradients: Sequence[Tensor]) -> None:
            assert add is not None
            add(index(reader), gradients)
            del rows_by_reader[reader]

        walk_owners(
            self.exchange, self.rank, self.size, sent_to(self.rank), sent_to, received_from, computed,
            returned_by, None if add is None else returned,
        )  # fmt: skip

    def _batched(self, sizes: list[int]) -> Iterator[tuple[int, int, int]]:
        """Yield the first block, the end, and the most rows of a block, of batches of blocks with rows."""
        first, count = 0, self.queries // BLOCK  # a last block of fewer queries is a batch of its own
        while first < len(sizes):
            width = total = sizes[first]
            end = first + 1
            while width and end < count:
                blocks, most = end + 1 - first, max(width, sizes[end])
                if blocks * (self.block_bytes + most * self.row_bytes) > self.workspace:
                    break
                if blocks * most > PADDED * (total + sizes[end]):
                    break
                width, total, end = most, total + sizes[end], end + 1
            if width:
                yield first, end, width
            first = end

    def batches(self, rows: HopRows) -> Iterator[ChosenRows]:
        """Yield the batches of blocks of a hop, segment by segment and item by item."""
        heads = self.q.shape[1] // self.choices
        unions = self.unions[:, : -(-self.queries // BLOCK), rows.owner].tolist()
        for start in range(0, self.slots, self.segment):
            length = min(self.segment, self.slots - start)
            # The slot of each position in the segment, from 1 on; 0 for others, and at the end for no key.
            table = self.table - (rows.owner * self.slots + start - 1)
            table.clamp_(0, length + 1).remainder_(length + 1)
            for item, sizes in enumerate(unions):
                sample, choice = divmod(item, self.choices)
                at = slice(sample, sample + 1), slice(choice * heads, (choice + 1) * heads)
                for first, end, width in self._batched([size[start // self.segment] for size in sizes]):
                    blocks, queries = end - first, slice(first * BLOCK, min(end * BLOCK, self.queries))
                    chosen = self._places(table, item, queries).view(blocks, -1)
                    used = chosen.new_zeros((blocks, length + 1), dtype=torch.bool).scatter_(1, chosen, True)
                    used[:, 0].fill_(False)
                    numbers = used.cumsum(1)  # of the chosen rows of a block, from 1 on
                    shape = (blocks, (queries.stop - queries.start) // blocks, width + 1)
                    place = numbers.gather(1, chosen).view(*shape[:2], -1)
                    hidden = used.new_ones(shape).scatter_(2, place, False)[..., 1:]
                    slots = _first_true(numbers, width) + (item * self.slots + start - 1)
                    yield ChosenRows((*at, queries), rows.number[slots.flatten()], hidden)

    def _by_block(self, x: Tensor, batch: ChosenRows) -> Tensor:
        """Return [g, n, queries * heads of a group, D] of the queries of a batch, from [B, H, Q, D]."""
        blocks, queries, _ = batch.hidden.shape
        x = x[batch.where][0].to(self.dtype)
        return x.unflatten(1, (blocks, queries)).unflatten(0, (len(self.k), -1)).transpose(1, 2).flatten(2, 3)

    def _by_query(self, x: Tensor, batch: ChosenRows) -> Tensor:
        """Return the reverse, [1, H / C, queries, D]."""
        x = x.unflatten(2, (-1, batch.hidden.shape[1])).transpose(1, 2)
        return x.flatten(2, 3).flatten(0, 1).unsqueeze(0)

    def _scores(self, batch: ChosenRows, rows: HopRows) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return scaled q [g, n, queries, D], k and v [g, n, U, ..], and masked scores."""
        blocks, queries, width = batch.hidden.shape
        k, v = (
            x.index_select(1, batch.rows).to(self.dtype).unflatten(1, (blocks, width))
            for x in (rows.k, rows.v)
        )
        q = self._by_block(self.q, batch) * self.scale
        scores = (q @ k.mT).unflatten(2, (-1, queries))
        return q, k, v, scores.masked_fill_(batch.hidden.unsqueeze(1), float("-inf")).flatten(2, 3)

    def forward(self) -> tuple[Tensor, Tensor]:
        """Return (out, lse)."""
        out, lse = make_empty_results(self.q, self.v.shape[-1], self.dtype)

        def compute(rows: HopRows) -> Sequence[Tensor]:
            for batch in self.batches(rows):
                _, _, v, scores = self._scores(batch, rows)
                part_lse = scores.logsumexp(-1)
                part = compute_weights(scores, part_lse) @ v
                part, part_lse = (self._by_query(x, batch) for x in (part, part_lse.unsqueeze(-1)))
                merge_(out[batch.where], lse[batch.where], part, part_lse.squeeze(-1))
            return ()

        self.walk(compute)
        return out.to(self.q.dtype), lse

    def backward(
        self, grad_out: Tensor, out: Tensor, lse: Tensor, grad_lse: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (dq, dk, dv)."""
        delta = (out.to(self.dtype) * grad_out).sum(-1)
        if grad_lse is not None:
            delta = delta - grad_lse
        dq = torch.zeros_like(self.q, dtype=self.dtype)
        totals = [torch.zeros_like(x, dtype=self.dtype) for x in (self.k, self.v)]

        def compute(rows: HopRows) -> Sequence[Tensor]:
            dk, dv = (torch.zeros_like(x, dtype=self.dtype) for x in (rows.k, rows.v))
            for batch in self.batches(rows):
                q, k, v, scores = self._scores(batch, rows)
                grad, of_lse, of_delta = (
                    self._by_block(x, batch) for x in (grad_out, lse.unsqueeze(-1), delta.unsqueeze(-1))
                )
                weights = compute_weights(scores, of_lse.squeeze(-1))
                of_scores = (grad @ v.mT).sub_(of_delta).mul_(weights)
                dq[batch.where].add_(self._by_query(of_scores @ k, batch), alpha=self.scale)
                _add_rows(dk, batch.rows, of_scores.mT @ q)
                _add_rows(dv, batch.rows, weights.mT @ grad)
            return dk, dv

        def add(index: Tensor, gradients: Sequence[Tensor]) -> None:
            for total, part in zip(totals, gradients, strict=True):
                total.index_add_(1, index, part)  # each row once

        self.walk(compute, add)
        # From [g, N * S, D] to [B, G, S, D].
        by_item = (x.unflatten(1, (-1, self.choices, self.slots)).movedim(0, 2) for x in totals)
        dk, dv = (x.flatten(1, 2).to(self.q.dtype).contiguous() for x in by_item)
        return dq.to(self.q.dtype), dk, dv


def _first_true(counts: Tensor, width: int) -> Tensor:
    """Return where the first `width` true entries are, int64 [.., width], given the counts up to each entry.

    The number of entries stands for those that are missing.
    """
    numbers = torch.arange(1, width + 1, device=counts.device)
    return torch.searchsorted(counts, numbers.expand(*counts.shape[:-1], -1).contiguous())


def _add_rows(total: Tensor, rows: Tensor, parts: Tensor) -> None:
    """Add parts [g, n, U, D] to the rows of a total [g, R, D], in the same order each time."""
    parts = parts.flatten(1, 2)
    if total.is_cuda:  # where index_add_ takes any order, and this one sorts
        total.transpose(0, 1).index_put_((rows,), parts.transpose(0, 1), accumulate=True)
    else:
        total.index_add_(1, rows, parts)


@lru_cache(maxsize=16)
@leave_inference_mode
def _places_by_position(layout: Layout, key: tuple[torch.device, int, Any]) -> Tensor:
    """Return rank * S + slot of each position, [T + 1]; at the end, and so for -1, P * S for no key."""
    places = np.append(layout.slots_by_position(), layout.ring_size * layout.local_tokens)
    return on_device(places, key[0])
