"""Accumulate the partial results ("parts") of a head chunk.

Decides when parts are merged or added, and in which memory; `merge.py` has the formula.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ds_ring.kernels.interface import ALL_HEADS, Kernel, Rows
from ds_ring.ring.merge import MAX_PARTS, add_parts_, assign_, merge_, merge_parts_

# [Note: the first part of a row]
# The first part of a row is assigned, not merged, so the memory of the accumulator is not filled before.
# Rows without any part are filled at the end. A part cannot be assigned if its rows are strided, if it has
# only some heads, or if some of its rows have a part already. Before such a part is merged or added,
# unwritten rows are filled with the neutral element: 0, and for lse -inf.


class UnwrittenSlots:
    """The slots of an accumulator that no partial result has been written to yet.

    Args:
        slots: number of slots of the accumulator, whose memory is uninitialised.
        fill: called with `tensors`, a first slot and an end; writes the neutral element to these
            slots: 0, or the result of attention over no key.

    Attributes:
        open: the slots that are not written yet, as pairs of a first slot and an end.
    """

    __slots__ = ("fill", "open", "slots", "tensors")

    def __init__(self, slots: int, fill: Callable[..., None], *tensors: Tensor) -> None:
        self.open, self.fill, self.tensors = [(0, slots)] if slots else [], fill, tensors
        self.slots = slots

    def claim(self, rows: Rows, heads: slice = slice(None)) -> bool:
        """Return whether a part is the first on all its rows: if so, the caller assigns it, else adds it.

        - All its rows are unwritten: mark them as written, return True.
        - Some are: fill those with the neutral element, return False.
        - Its rows are strided, or of some heads only: fill every unwritten slot, return False.
        """
        if not self.open:
            return False
        dense = rows.step == 1 and (rows.repeats == 1 or rows.stride == rows.length)
        if not dense or heads != slice(None):
            self.finish()
            return False
        start, end = rows.start, rows.start + rows.repeats * rows.length
        if self.open == [(start, end)]:  # the usual case
            self.open = []
            return True
        cut = [(max(a, start), min(b, end)) for a, b in self.open if a < end and start < b]
        self.mark_written(start, end)
        if cut == [(start, end)]:
            return True
        for piece in cut:
            self.fill(*self.tensors, *piece)
        return False

    def mark_written(self, start: int, end: int) -> None:
        """Remove slots from `open`."""
        self.open = [
            piece
            for a, b in self.open
            for piece in ((a, min(b, start)), (max(a, end), b))
            if piece[0] < piece[1]
        ]

    def finish(self) -> None:
        """Fill the slots that were never written."""
        for piece in self.open:
            self.fill(*self.tensors, *piece)
        self.open = []


def fill_empty_rows(out: Tensor, lse: Tensor, start: int, end: int) -> None:
    """Write the result of attention over no key to some slots."""
    out[:, :, start:end].zero_()
    lse[:, :, start:end].fill_(float("-inf"))


def zero(*arguments: Any) -> None:
    """Write zeros to some slots of tensors; the last two arguments are the first slot and the end."""
    *tensors, start, end = arguments
    for x in tensors:
        x[:, :, start:end].zero_()


_Pieces = tuple[tuple[int, int], ...]


@lru_cache(maxsize=4096)
def _cut(slots: int, missing: _Pieces, parts: tuple[Rows, ...]) -> list[tuple[int, int, bool, _Pieces]]:
    """Cut the slots at both ends of every part, and of every range in `missing` (not written yet).

    Returns:
        for each range: start, end, whether it was written, and the parts that cover it, as (index, offset).
    """
    bounds = [(rows.start, rows.start + rows.length) for rows in parts]
    cuts = {0, slots}.union(*bounds, *missing)
    pieces = []
    for start, end in pairwise(sorted(cuts)):
        covering = tuple((i, start - a) for i, (a, b) in enumerate(bounds) if a <= start and end <= b)
        pieces.append((start, end, not any(a <= start and end <= b for a, b in missing), covering))
    return pieces


# [Note: parts that wait]
# Merging a part in a 16-bit dtype into a float32 accumulator moves 10 bytes an element (4 and 2 are read, 4
# written). A causal zigzag pass of 8 ranks has 8 parts. The kernels "flash" and "flex" return few parts,
# in new tensors (`Kernel.few_parts`). So a part waits in a list (`Accumulator.waiting`) until one Triton
# kernel (`cuda/merge.py`) merges several parts, and reads and writes the accumulator once for all of them.
# The last merge writes the rounded result, so a pass of at most `MAX_WAITING` parts needs no accumulator.
# Parts that wait take memory. To make up for it, out and dQ are allocated only when the first chunk is done.
# The waiting parts are merged before the next hop once there are `MAX_WAITING` of them, or
# `MAX_WAITING_WITH_SUM` if an accumulator exists. Parts in the accumulators' dtype do not wait:
# each takes as much memory as an accumulator.
MAX_WAITING, MAX_WAITING_WITH_SUM = 4, 2


def check_parts_wait(kernel: Kernel, dtype: torch.dtype, accumulator: torch.dtype) -> bool:
    """Return whether the parts of a kernel wait to be merged together, for results of a dtype."""
    return getattr(kernel, "few_parts", False) and dtype.itemsize < accumulator.itemsize


class Accumulator:
    """Collect the parts of a head chunk's results: out and lse, or dQ, or dK and dV.

    Parts of out and lse are merged; parts of gradients are added. If `waits` is False, `add` merges or adds a
    part at once. If `waits` is True, parts wait in a list, and one call merges or adds several parts
    ([Note: parts that wait]). A part of strided rows or of some heads never waits.

    Accumulators are the tensors into which parts are merged or added. If `waits` is False and the results
    have the dtype of the accumulators, the results themselves are the accumulators.

    Args:
        results: returns a sequence that begins with the result tensors [B, H, S, ...], without lse; its
            further items are ignored.
        like: a tensor on the device of the results.
        shapes: of the results.
        dtype: of the accumulators.
        lse: lse of the results, uninitialised, of the accumulators' dtype; None if parts are added.
        waits: whether parts wait to be merged together.

    Attributes:
        own_bytes: memory of the accumulators; 0 if the results are the accumulators.
    """

    __slots__ = (
        "_like", "_made", "_results", "_shapes", "_targets", "_unwritten", "_waits", "dtype", "lse",
        "own_bytes", "waiting",
    )  # fmt: skip

    def __init__(
        self, results: Callable[[], Sequence[Any]], like: Tensor, shapes: Sequence[Sequence[int]],
        dtype: torch.dtype, lse: Tensor | None, waits: bool,
    ) -> None:  # fmt: skip
        self.lse = lse
        self._results, self._like, self._shapes, self.dtype = results, like, shapes, dtype
        self._waits, self.own_bytes = waits, 0
        self.waiting: list[tuple[Rows, tuple[Tensor, ...]]] = []
        self._unwritten = UnwrittenSlots(shapes[0][2], zero if lse is None else fill_empty_rows)
        self._made: tuple[Tensor, ...] | None = None  # the accumulators, with lse
        self._targets: tuple[Tensor, ...] | None = None
        if not waits:
            targets = self._targets = tuple(results()[: len(shapes)])
            if targets[0].dtype == dtype:  # the results are the accumulators
                self._made = self._unwritten.tensors = targets if lse is None else (*targets, lse)
            else:
                self._get_accumulators()

    def _get_accumulators(self) -> tuple[Tensor, ...]:
        """Return the accumulators and lse; the first call allocates them."""
        if self._made is not None:
            return self._made
        if self._targets is None:
            accumulators = tuple(self._like.new_empty(shape, dtype=self.dtype) for shape in self._shapes)
        else:
            accumulators = tuple(torch.empty_like(x, dtype=self.dtype) for x in self._targets)
        self.own_bytes = sum([x.nbytes for x in accumulators])
        # `_unwritten` gets the tensors, not this object: that would be a reference cycle, which keeps their
        # memory until garbage collection.
        self._made = self._unwritten.tensors = accumulators if self.lse is None else (*accumulators, self.lse)
        return self._made

    def make_room(self) -> None:
        """Merge the waiting parts if `MAX_WAITING` wait, or `MAX_WAITING_WITH_SUM` beside an accumulator."""
        if len(self.waiting) >= (MAX_WAITING if self._made is None else MAX_WAITING_WITH_SUM):
            self._write(self._get_accumulators())

    def add(self, rows: Rows, heads: slice, *parts: Tensor) -> None:
        """Merge or add a part, now or later; the caller must not write to `parts` afterwards."""
        accumulators = self._made
        if self._waits and heads == ALL_HEADS and rows.step == rows.repeats == 1:
            # `make_room` empties a long list before each hop, but the parts of one hop may still fill it.
            if len(self.waiting) == MAX_PARTS - (accumulators is not None):
                self._write(self._get_accumulators())
            self.waiting.append((rows, parts))
            return
        if accumulators is None:
            accumulators = self._get_accumulators()
        first = bool(self._unwritten.open) and self._unwritten.claim(rows, heads)
        views = rows.views(*accumulators, heads=heads)  # views: the accumulators are changed in place
        if self.lse is not None:
            (assign_ if first else merge_)(*views, *parts)
            return
        for to, part in zip(views, parts, strict=True):
            (to.copy_ if first else to.add_)(part)

    def so_far(self) -> tuple[Tensor, ...]:
        """Return the accumulators (and lse) with all parts so far, and neutral elements in other rows."""
        accumulators = self._get_accumulators()
        self.merge()
        self._unwritten.finish()
        return accumulators

    def finish(self) -> None:
        """Write the results to the result tensors and to lse."""
        accumulators = self._made
        if self._targets is None:
            self._targets = tuple(self._results()[: len(self._shapes)])
        targets = self._targets if self.lse is None else (*self._targets, self.lse)
        if accumulators is None:
            self._unwritten.tensors = targets
        if self.waiting:
            self._write(targets)
        else:
            if self._unwritten.open:
                self._unwritten.finish()
            for target, x in zip(targets, accumulators or targets, strict=True):
                if target is not x:
                    target.copy_(x)
        self.own_bytes = 0

    def whole(self) -> tuple[Tensor, ...] | None:
        """Return the tensors of the only part, if a single part waits and covers all slots; else None."""
        if len(self.waiting) != 1 or self._made is not None:
            return None
        ((rows, parts),) = self.waiting
        return parts if rows.length == self._unwritten.slots else None

    def merge(self) -> None:
        """Merge the waiting parts now: the caller is about to reuse their memory."""
        if self.waiting:
            self._write(self._get_accumulators())

    def _write(self, targets: tuple[Tensor, ...]) -> None:
        """Merge the waiting parts and the accumulators into `targets`: the accumulators, or the results."""
        accumulators, waiting, first = self._made, self.waiting, self._unwritten
        still_open = []
        rows = tuple([rows for rows, _ in waiting])
        for start, end, written, covering in _cut(first.slots, tuple(first.open), rows):
            count = end - start
            parts = [[x.narrow(2, at, count) for x in waiting[number][1]] for number, at in covering]
            if written and accumulators is not None and (parts or targets is not accumulators):
                parts.append([x.narrow(2, start, count) for x in accumulators])
            if not parts:
                if targets is not accumulators and not written:
                    first.fill(*targets, start, end)
                elif not written:
                    still_open.append((start, end))
                continue
            pieces = [x.narrow(2, start, count) for x in targets]
            if self.lse is None:
                for target, *addends in zip(pieces, *parts, strict=True):
                    add_parts_(target, addends)
            else:
                merge_parts_(pieces[0], pieces[1], parts)
        first.open = still_open
        waiting.clear()
