"""Tokens of several ranks, and the messages that bring and return them.

Tensors of messages have tokens first, [n, B, heads, ...]: a range of tokens is one message without a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from ds_ring.comm.device_tables import on_device
from ds_ring.comm.messages import Message
from ds_ring.masks.slots import SlotRanges, count_slots, expand_ranges
from ds_ring.transports.tiles.grid import ALL

FEW_RANGES = 16  # of tokens: up to here they are copied as slices, above by an index


def rows(like: Tensor, count: int, dtype: torch.dtype | None = None) -> Tensor:
    """Return uninitialised memory for `count` tokens of the shape of those in `like` [n, ...]."""
    return like.new_empty((count, *like.shape[1:]), dtype=dtype or like.dtype)


def selected(x: Tensor, slots: SlotRanges) -> Tensor:
    """Return some tokens of x [n, ...]: a view where they are one range."""
    if len(slots) > FEW_RANGES:
        return x.index_select(0, on_device(expand_ranges(slots), x.device))
    parts = [x[start:end] for start, end in slots.tolist()]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def add_at(total: Tensor, slots: SlotRanges, part: Tensor) -> None:
    """Add a part to some tokens of a sum [n, ...]."""
    if len(slots) > FEW_RANGES:
        total.index_add_(0, on_device(expand_ranges(slots), total.device), part)
        return
    lengths = (slots[:, 1] - slots[:, 0]).tolist()
    for (start, end), rows in zip(slots.tolist(), part.split(lengths), strict=True):
        total[start:end] += rows


class StepMessages:
    """The messages of a step. Both sides of a connection add theirs in one order."""

    def __init__(self) -> None:
        self.sends: list[Message] = []
        self.receives: list[Message] = []

    def send(self, to: int, names: Sequence[str], tensors: Sequence[Tensor]) -> None:
        """Send tensors to a rank."""
        # The memory around a message may be written meanwhile: `data` counts the writes to this view alone.
        self.sends += [Message(x.data, to, name) for name, x in zip(names, tensors, strict=True)]

    def receive(self, of: int, names: Sequence[str], tensors: Sequence[Tensor]) -> None:
        """Receive tensors from a rank; nothing where they have no tokens."""
        if len(tensors[0]):
            self.receives += [Message(x, of, name) for name, x in zip(names, tensors, strict=True)]


class GridSide:
    """One side of a tile: the queries of a row, or the keys of a column.

    Args:
        local: the tensors of the own shard's tokens, [B, heads, valid, ...].
        names: of these tensors in messages.
        read: the slots that this rank reads of each rank, by distance, the own shard first.
        readers: the own slots that the rank at each distance reads.
        rank_at: returns the rank at a distance; at a negative one, the rank whose tokens come here.
        together: the tokens of all ranks are in one buffer, so that one kernel call may read them all; else
            each rank's have memory of their own until `drop`.
    """

    def __init__(
        self, local: Sequence[Tensor], names: Sequence[str], read: Sequence[SlotRanges],
        readers: Sequence[SlotRanges], rank_at: Callable[[int], int], together: bool,
    ) -> None:  # fmt: skip
        self.counts = [count_slots(slots) for slots in read]
        self._names, self._readers, self._rank_at = names, readers, rank_at
        self._own = [x.movedim(2, 0) for x in local]  # views; `_parts` has copies for messages
        self._parts: dict[int, list[Tensor]] = {}
        self._views: dict[int, list[Tensor]] = {0: list(local)}
        if together:
            self._parts[ALL] = [rows(x, sum(self.counts)) for x in self._own]
            split = zip(*(x.split(self.counts) for x in self._parts[ALL]), strict=True)
            self._parts |= {distance: list(parts) for distance, parts in enumerate(split)}
            self._pack()

    def _pack(self) -> None:
        for to, x in zip(self._parts[0], self._own, strict=True):
            to.copy_(x)

    def views(self, distance: int) -> list[Tensor]:
        """Return the tokens of one rank, or of all, as [B, heads, n, ...]; the same objects each time."""
        if distance not in self._views:
            self._views[distance] = [x.movedim(0, 2) for x in self._parts[distance]]
        return self._views[distance]

    def drop(self, distances: Sequence[int]) -> None:
        """Forget the tokens of other ranks."""
        for distance in distances:
            del self._parts[distance], self._views[distance]

    def arrive(self, batch: StepMessages, distances: Sequence[int]) -> None:
        """Add the messages of own tokens to the ranks at these distances, and of other ranks' tokens."""
        for distance in distances:
            slots = self._readers[distance]
            if len(slots):
                if 0 not in self._parts:
                    self._parts[0] = [rows(x, self.counts[0]) for x in self._own]
                    self._pack()
                chosen = [selected(x, slots) for x in self._parts[0]]
                batch.send(self._rank_at(distance), self._names, chosen)
            if distance not in self._parts:
                self._parts[distance] = [rows(x, self.counts[distance]) for x in self._own]
            batch.receive(self._rank_at(-distance), self._names, self._parts[distance])

    def give_back(
        self, batch: StepMessages, distances: Sequence[int], names: Sequence[str],
        results: Mapping[int, Sequence[Tensor]], like: Sequence[Tensor],
    ) -> list[tuple[SlotRanges, list[Tensor]]]:  # fmt: skip
        """Add the messages of results for other ranks' tokens, and of those for own tokens.

        Args:
            batch, distances, names: of the messages.
            results: by distance, [n, B, heads, ...].
            like: tensors of the results' shapes and dtypes, with any number of tokens.

        Returns:
            for each distance the own slots, and the memory for their results.
        """
        arrivals = []
        for distance in distances:
            if self.counts[distance]:
                batch.send(self._rank_at(-distance), names, results[distance])
            slots = self._readers[distance]
            coming = [rows(x, count_slots(slots)) for x in like]
            batch.receive(self._rank_at(distance), names, coming)
            if len(slots):
                arrivals.append((slots, coming))
        return arrivals
