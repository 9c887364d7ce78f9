"""Both passes of attention over chosen keys: each rank asks the owners for the rows that its queries chose.

Rows of one owner are here at a time; gradients of rows return to their owner. A rank holds the shards of two
ranks at a time and a few bytes for each position, so memory is O(T / P).

[Note: what a query block reads]
Neighbouring queries choose similar keys. So a block of queries attends to the union of the rows that
its queries chose, by one matrix product under a boolean mask of the pairs that were chosen. A gather of k
rows for each query would take k times the memory.

Shapes: B samples, C choices (heads that choose for themselves), H query heads, G key/value heads, S local
tokens, Q local queries, D and E head dims of keys and values, N = B * C, R chosen rows of one owner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ds_ring.comm.device_tables import on_device, outside_inference_mode
from ds_ring.kernels.reference import weights_of
from ds_ring.ops.context import RingContext
from ds_ring.ring.merge import accumulator_dtype, empty_results, merge_
from ds_ring.schedule.layout import Layout
from ds_ring.transports.owner_walk import walk_owners

BLOCK = 32  # queries of a block; see [Note: what a query block reads]
KEYS = 2048  # rows of a block at most


class HopRows(NamedTuple):
    """Chosen rows of one owner's K and V, of all items n, one item after the other."""

    owner: int
    slots: Tensor  # int64 [R]: n * S + slot, ascending
    k: Tensor  # [R, G / C, D]
    v: Tensor  # [R, G / C, E]


class QueryBlock(NamedTuple):
    """Some queries of one item and rows that at least one of them chose: [Note: what a query block reads]."""

    where: tuple[slice, slice, slice]  # sample, query heads, query slots
    rows: Tensor  # int64, indices into the rows of the hop, each once
    visible: Tensor  # bool [queries, rows]


class SelectedPass:
    """Attend to the chosen rows of one owner after the other: at hop s to those of rank p - s."""

    def __init__(
        self, context: RingContext, q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, block: int
    ) -> None:
        mesh, layout = context.mesh, context.layout_for(0, q.device.type)
        self.exchange, self.size, self.rank = context.exchange, mesh.ring_size, mesh.ring_rank
        self.scale = q.shape[-1] ** -0.5 if context.options.scale is None else context.options.scale
        self.choices = 1 if chosen.dim() == 3 else chosen.shape[1]
        self.slots, self.dtype = layout.local_tokens, accumulator_dtype(q.dtype)
        self.chosen, self.block = chosen.reshape(-1, *chosen.shape[-2:]), block
        self.table = _slots_by_position(layout, q.device)
        positions = on_device(layout.positions(self.rank), q.device)
        self.last = positions.repeat_interleave(max(1, chosen.shape[-2] // self.slots))  # [Q], for blocks
        # Of blocks, places are made where they are used: there are block times as many.
        self.placed: Tensor | None = None
        if block == 1:
            self.placed = self._places(slice(None), slice(None))
        # Slots of padding, which chose nothing, come last.
        choosing = (self.chosen >= 0).flatten(2).any(-1).any(0).nonzero()
        self.queries = int(choosing[-1]) + 1 if len(choosing) else 0
        self.q, self.k, self.v = q, self._by_token(k), self._by_token(v)
        # What this rank's queries chose of each rank, and what the queries of each rank chose here, as bits.
        self.wanted = [self._wanted(owner) for owner in range(self.size)]
        self.asked = self.wanted
        if self.exchange is not None:
            self.asked = self.exchange.all_to_all(self.wanted, mesh.ring_group)

    def _by_token(self, x_BGSD: Tensor) -> Tensor:
        """Return [N * S, G / C, D]."""
        return x_BGSD.unflatten(1, (self.choices, -1)).movedim(3, 2).flatten(0, 2)

    def _places(self, items: int | slice, queries: slice) -> Tensor:
        """Return rank * S + slot of each chosen key of some queries, [.., n, k * block]; -1 for none."""
        if self.placed is not None:
            return self.placed[items, queries]
        tokens = self.chosen[items, queries]
        hidden = tokens < 0
        if self.block > 1:
            behind = torch.arange(self.block, device=tokens.device)
            tokens = tokens.unsqueeze(-1) + behind
            hidden = hidden.unsqueeze(-1) | (tokens > self.last[queries, None, None])
            tokens, hidden = tokens.flatten(-2), hidden.flatten(-2)
        return self.table[tokens.masked_fill(hidden, 0)].masked_fill_(hidden, -1)

    def _local(self, place: Tensor, owner: int) -> Tensor:
        """Return the slots of chosen keys in the shard of `owner`; S for keys of other shards, or none."""
        local = place - owner * self.slots
        return torch.where((local >= 0) & (local < self.slots), local, self.slots)

    def _wanted(self, owner: int) -> Tensor:
        """Return which slots of a shard this rank's queries chose, as bits: uint8 [N, ceil(S / 8)]."""
        wanted = self.chosen.new_zeros((len(self.chosen), self.slots + 1), dtype=torch.bool)
        step = max(BLOCK, KEYS // self.block)
        for first in range(0, self.queries, step):
            places = self._places(slice(None), slice(first, min(first + step, self.queries)))
            wanted.scatter_(1, self._local(places, owner).flatten(1), True)
        bits = wanted[:, : self.slots].to(torch.uint8)
        bits = torch.nn.functional.pad(bits, (0, -self.slots % 8)).unflatten(1, (-1, 8))
        return (bits << torch.arange(8, dtype=torch.uint8, device=bits.device)).sum(-1, dtype=torch.uint8)

    def _index(self, bits: Tensor) -> Tensor:
        shifted = bits.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=bits.device)
        return (shifted & 1).flatten(1)[:, : self.slots].bool().flatten().nonzero().squeeze(1)

    def walk(
        self, compute: Callable[[HopRows], Sequence[Tensor]],
        add: Callable[[Tensor, Sequence[Tensor]], None] | None = None,
    ) -> None:  # fmt: skip
        """Call `compute` with the rows of each hop, while those of the next one travel.

        If there is `add`, what `compute` returns (gradients of K's and V's rows) returns to the owner, and
        `add` gets what others return for rows of this rank, with their index; in the order of hops.
        """
        kv, index_of = (self.k, self.v), {self.rank: self._index(self.wanted[self.rank])}
        asked = {self.rank: index_of[self.rank]}  # rows of this rank's shard, by the rank that reads them

        def sent_to(reader: int) -> Sequence[Tensor]:
            leaving = self._index(self.asked[reader])
            return [x[leaving] for x in kv]

        def received_from(owner: int) -> Sequence[Tensor]:
            index_of[owner] = self._index(self.wanted[owner])
            return [x.new_empty((len(index_of[owner]), *x.shape[1:])) for x in kv]

        def returned_by(reader: int) -> Sequence[Tensor]:
            asked[reader] = self._index(self.asked[reader])
            return [self.k.new_empty((len(asked[reader]), *x.shape[1:]), dtype=self.dtype) for x in kv]

        walk_owners(
            self.exchange, self.rank, self.size, [x[index_of[self.rank]] for x in kv], sent_to, received_from,
            lambda owner, rows: compute(HopRows(owner, index_of.pop(owner), rows[0], rows[1])), returned_by,
            None if add is None else lambda reader, gradients: add(asked.pop(reader), gradients),
        )  # fmt: skip

    def blocks(self, rows: HopRows) -> Iterator[QueryBlock]:
        """Yield the blocks of queries and rows of a hop."""
        heads = self.q.shape[1] // self.choices
        ends = torch.searchsorted(
            rows.slots, self.slots * torch.arange(len(self.chosen) + 1, device=rows.slots.device)
        )
        for item, (first, end) in enumerate(zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)):
            count = end - first
            if not count:
                continue
            number = rows.slots.new_full((self.slots + 1,), count)  # of each slot among the item's rows
            number[rows.slots[first:end] - item * self.slots] = torch.arange(count, device=rows.slots.device)
            sample, choice = divmod(item, self.choices)
            at = slice(sample, sample + 1), slice(choice * heads, (choice + 1) * heads)
            for start in range(0, self.queries, BLOCK):
                queries = slice(start, min(start + BLOCK, self.queries))
                chosen = number[self._local(self._places(item, queries), rows.owner)]
                used, place = chosen.unique(return_inverse=True)
                visible = chosen.new_zeros((len(chosen), len(used)), dtype=torch.bool)
                visible.scatter_(1, place, True)
                used = used[used < count]  # `count` means no key of this owner, and is the last one
                for first_used in range(0, len(used), KEYS):
                    part = used[first_used : first_used + KEYS]
                    seen = visible[:, first_used : first_used + len(part)]
                    yield QueryBlock((*at, queries), part + first, seen)

    def _scores(self, block: QueryBlock, rows: HopRows) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return q [g, r * queries, D], k and v [g, R, ..], and masked scores [g * r, queries, R]."""
        k, v = (x[block.rows].to(self.dtype).transpose(0, 1) for x in (rows.k, rows.v))
        q = self.q[block.where][0].to(self.dtype)
        q_of_group = q.reshape(len(k), -1, q.shape[-1])
        scores = (q_of_group @ k.mT * self.scale).view(len(q), -1, k.shape[1])
        return q_of_group, k, v, scores.masked_fill_(~block.visible, float("-inf"))

    def forward(self) -> tuple[Tensor, Tensor]:
        """Return (out, lse)."""
        out, lse = empty_results(self.q, self.v.shape[-1], self.dtype)

        def compute(rows: HopRows) -> Sequence[Tensor]:
            for block in self.blocks(rows):
                _, _, v, scores = self._scores(block, rows)
                part_lse = scores.logsumexp(-1)
                weights = weights_of(scores, part_lse)
                part = (weights.view(len(v), -1, v.shape[1]) @ v).view(*part_lse.shape, -1)
                merge_(out[block.where], lse[block.where], part.unsqueeze(0), part_lse.unsqueeze(0))
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
            for block in self.blocks(rows):
                q, k, v, scores = self._scores(block, rows)
                grad = grad_out[block.where][0].to(self.dtype)
                grad_of_group = grad.reshape(len(v), -1, v.shape[-1])
                weights = weights_of(scores, lse[block.where][0])
                products = (grad_of_group @ v.mT).view_as(weights)
                of_scores = weights * (products - delta[block.where][0].unsqueeze(-1)) * self.scale
                of_group, weights = (x.view(len(k), -1, k.shape[1]) for x in (of_scores, weights))
                dq[block.where] += (of_group @ k).view(1, *grad.shape[:2], -1)
                # Each row occurs once in a block, so the order of additions is that of the blocks.
                dk.index_add_(0, block.rows, (of_group.mT @ q).transpose(0, 1))
                dv.index_add_(0, block.rows, (weights.mT @ grad_of_group).transpose(0, 1))
            return dk, dv

        def add(index: Tensor, gradients: Sequence[Tensor]) -> None:
            for total, part in zip(totals, gradients, strict=True):
                total.index_add_(0, index, part)

        self.walk(compute, add)
        # From [N * S, G / C, D] to [B, G, S, D].
        dk, dv = (
            x.unflatten(0, (-1, self.choices, self.slots))
            .movedim(2, 3)
            .flatten(1, 2)
            .to(self.q.dtype)
            .contiguous()
            for x in totals
        )
        return dq.to(self.q.dtype), dk, dv


@lru_cache(maxsize=16)
@outside_inference_mode
def _slots_by_position(layout: Layout, device: torch.device) -> Tensor:
    return on_device(layout.slots_by_position(), device)
