"""Sum up the partial results of a head chunk: in which memory, and when they are merged or added.

Owns accumulators, and the parts that wait for one another; `merge.py` owns the formula.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ds_ring.runtime.kernels.interface import ALL_HEADS, Kernel, Rows
from ds_ring.runtime.merge import add_parts_, assign_, merge_, merge_parts_
from ds_ring.runtime.trace import Trace

# [Note: the first part of a row]
# The first partial result of a row is assigned to the accumulator, and later ones are merged into it. So the
# accumulator is not set to zero before. Rows that no partial result covers are filled at the end.


class FirstParts:
    """The slots of an accumulator that no partial result has been written to yet.

    Args:
        slots: number of slots of the accumulator, whose memory is uninitialised.
        fill: called with `given`, a first slot and an end, to write the neutral element to these slots: 0, or
            the result of attention over no key.

    Attributes:
        open: these slots, as pairs of a first slot and an end.
    """

    __slots__ = ("_slots", "fill", "given", "open")

    def __init__(self, slots: int, fill: Callable[..., None], *given: Tensor) -> None:
        self.open, self.fill, self.given = [(0, slots)] if slots else [], fill, given
        self._slots = slots

    def is_first(self, rows: Rows, heads: slice = slice(None)) -> bool:
        """Return True if the part is the first on all of its rows, so it is assigned; else it is added.

        If the rows are not contiguous, belong to some heads only, or are partly written, the unwritten slots
        are filled with the neutral element here, and the part is added.
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
        self.write(start, end)
        if cut == [(start, end)]:
            return True
        for piece in cut:
            self.fill(*self.given, *piece)
        return False

    def segments(self, parts: Iterable[Rows]) -> Iterator[tuple[int, int, bool]]:
        """Yield (start, end, whether it was written) of slots with the same parts, in order."""
        cuts = {edge for rows in parts for edge in (rows.start, rows.start + rows.length)}
        cuts |= {edge for piece in self.open for edge in piece} | {0, self._slots}
        missing = list(self.open)
        for start, end in pairwise(sorted(cuts)):
            yield start, end, not any(a <= start and end <= b for a, b in missing)

    def write(self, start: int, end: int) -> None:
        """Take note that slots are written."""
        self.open = [
            piece
            for a, b in self.open
            for piece in ((a, min(b, start)), (max(a, end), b))
            if piece[0] < piece[1]
        ]

    def finish(self) -> None:
        """Fill the slots that were never written."""
        for piece in self.open:
            self.fill(*self.given, *piece)
        self.open = []


def see_no_key(out: Tensor, lse: Tensor, start: int, end: int) -> None:
    """Write the result of attention over no key to some slots."""
    out[:, :, start:end].zero_()
    lse[:, :, start:end].fill_(float("-inf"))


def zero(first: Tensor, second: Tensor, start: int, end: int) -> None:
    """Write zeros to some slots of two tensors, which may be one."""
    first[:, :, start:end].zero_()
    if second is not first:
        second[:, :, start:end].zero_()


# [Note: parts that wait]
# Merging every part at once into a float32 accumulator moves 10 bytes an element of 16 bits (4 and 2 are
# read, 4 written), and a causal zigzag pass of 8 ranks has 8 such parts. The kernels "flash" and "flex"
# return few parts, in new tensors (`Kernel.few_parts`). So parts wait until there are several, and one kernel
# (`merge_triton.py`) reads each of them once. The last merge writes the result itself, rounded, and a pass of
# at most `ALONE` parts has no accumulator. While the kernel computes, what waits takes no more memory than
# the accumulator and the result would, and the result is made when the first chunk is done. So a pass needs
# no more memory than if nothing waited. Results in the accumulators' dtype gain nothing by waiting.
ALONE, BESIDE = 4, 2  # parts that are merged before the next hop: with no accumulator, and beside one
AT_ONCE = 5  # of one merge, the accumulator among them


def parts_wait(kernel: Kernel, dtype: torch.dtype, accumulator: torch.dtype) -> bool:
    """Return whether parts of a kernel wait for one another, for results of a dtype."""
    return getattr(kernel, "few_parts", False) and dtype.itemsize < accumulator.itemsize


class Total:
    """One result of a chunk, as its parts arrive: out with its lse, or dQ; [Note: parts that wait].

    Args:
        result: returns the tensor that is written to, [B, H, S, D], uninitialised.
        like: a tensor of its device.
        shape: of the result.
        dtype: of the accumulator.
        lse: [B, H, S], uninitialised, of the same dtype: the parts are merged; None: they are added.
        waits: whether parts wait for one another.
        trace: counts the bytes of accumulators.
    """

    def __init__(
        self, result: Callable[[], Tensor], like: Tensor, shape: tuple[int, ...], dtype: torch.dtype,
        lse: Tensor | None, waits: bool, trace: Trace | None,
    ) -> None:  # fmt: skip
        self.lse = lse
        self._result, self._like, self._shape, self._dtype = result, like, shape, dtype
        self._waits, self._trace = waits, trace
        self.waiting: list[tuple[Rows, Tensor, Tensor | None]] = []
        self._first = FirstParts(shape[2], zero if lse is None else see_no_key)
        self._accumulator: Tensor | None = None
        self._target = None if waits else result()
        if not waits:
            self._accumulate()

    def _accumulate(self) -> Tensor:
        """Return the accumulator, made at the first call; the result itself if that has the dtype."""
        if self._accumulator is None:
            made = self._target
            if made is None or made.dtype != self._dtype:
                made = self._like.new_empty(self._shape, dtype=self._dtype)
                if self._trace is not None:
                    self._trace.accumulators_bytes += made.nbytes
            self._accumulator = made
            # These tensors, not self: a reference cycle would keep their memory until garbage collection.
            self._first.given = made, made if self.lse is None else self.lse
        return self._accumulator

    def make_room(self) -> None:
        """Merge the parts that wait, if they are too many beside the next one."""
        if len(self.waiting) >= (ALONE if self._accumulator is None else BESIDE):
            self._write(self._accumulate())

    def add(self, rows: Rows, heads: slice, part: Tensor, lse: Tensor | None = None) -> None:
        """Merge (or add) a part, now or later; nobody may write to it from here on."""
        if self._waits and heads == ALL_HEADS and rows.step == rows.repeats == 1:
            if len(self.waiting) == AT_ONCE - (self._accumulator is not None):  # all of one hop, or returned
                self._write(self._accumulate())
            self.waiting.append((rows, part, lse))
            return
        total = self._accumulator  # calls of Python are most of a hop's host time
        total, first = total if total is not None else self._accumulate(), self._first.is_first(rows, heads)
        # views, so that the accumulators are changed in place
        if lse is None or self.lse is None:
            (there,) = rows.views(total, heads=heads)
            (there.copy_ if first else there.add_)(part)
        else:
            there, of = rows.views(total, self.lse, heads=heads)
            (assign_ if first else merge_)(there, of, part, lse)

    def so_far(self) -> Tensor:
        """Return the accumulator with all parts that have arrived; rows without one are empty."""
        total = self._accumulate()
        self._write(total)
        self._first.finish()
        return total

    def finish(self) -> None:
        """Write the result."""
        made, result = self._accumulator, self._result() if self._target is None else self._target
        if made is None:
            self._first.given = result, result if self.lse is None else self.lse
        if self.waiting:
            self._write(result)
        else:
            if self._first.open:
                self._first.finish()
            if made is not None and made is not result:
                result.copy_(made)
        if made is not None and made is not result and self._trace is not None:
            self._trace.accumulators_bytes -= made.nbytes

    def whole(self) -> Tensor | None:
        """Return the only part, if it waits and has all slots."""
        if len(self.waiting) != 1 or self._accumulator is not None:
            return None
        ((rows, part, _),) = self.waiting
        return part if rows.length == self._shape[2] else None

    def merge(self) -> None:
        """Merge the parts that wait, because others will write to their memory."""
        if self.waiting:
            self._write(self._accumulate())

    def _write(self, target: Tensor) -> None:
        """Merge what waits, and the accumulator, into the accumulator or, at the end, into the result."""
        made, lse, waiting = self._accumulator, self.lse, self.waiting
        for start, end, written in list(self._first.segments([rows for rows, *_ in waiting])):
            parts = [
                (part[:, :, start - rows.start : end - rows.start],
                 None if of is None else of[:, :, start - rows.start : end - rows.start])
                for rows, part, of in waiting
                if rows.start <= start and end <= rows.start + rows.length
            ]  # fmt: skip
            if written and made is not None and (parts or target is not made):
                parts.append((made[:, :, start:end], None if lse is None else lse[:, :, start:end]))
            if not parts:
                if target is made or written:
                    continue
                self._first.fill(target, target if lse is None else lse, start, end)
            elif lse is None:
                add_parts_(target[:, :, start:end], [part for part, _ in parts])
            else:
                merge_parts_(target[:, :, start:end], lse[:, :, start:end], parts)
            self._first.write(start, end)
        waiting.clear()


class TotalPair:
    """The sums of dK and dV over parts of some keys; parts that do not wait are added to both at once.

    Args:
        results: returns what is written to, uninitialised: a tensor [B, G, slots, D] and one of E, and more.
        like: two tensors of these shapes and their device.
        dtype: of the accumulators.
        waits, trace: see `Total`.
    """

    __slots__ = ("_first", "_results", "_tensors", "_totals", "_trace", "dtype")

    def __init__(
        self, results: Callable[[], Sequence[Any]], like: Sequence[Tensor], dtype: torch.dtype,
        waits: bool, trace: Trace | None,
    ) -> None:  # fmt: skip
        self.dtype, self._trace = dtype, trace
        self._totals: tuple[Total, ...] = ()
        if waits:
            self._totals = tuple(
                Total(lambda i=i: results()[i], x, tuple(x.shape), dtype, None, True, trace)  # type: ignore[misc]
                for i, x in enumerate(like)
            )
            return
        first, second = self._results = results()[:2]
        if first.dtype != dtype:
            first, second = torch.empty_like(first, dtype=dtype), torch.empty_like(second, dtype=dtype)
        self._tensors = first, second
        self._first = FirstParts(first.shape[2], zero, first, second)
        if trace is not None:
            trace.accumulators_bytes += self._apart_bytes

    @property
    def _apart_bytes(self) -> int:
        pairs = zip(self._tensors, self._results, strict=True)
        return sum(tensor.nbytes for tensor, result in pairs if tensor is not result)

    def add(self, rows: Rows, first: Tensor, second: Tensor) -> None:
        """Add a part to some slots, now or later; nobody may write to it from here on."""
        if self._totals:
            self._totals[0].add(rows, ALL_HEADS, first)
            self._totals[1].add(rows, ALL_HEADS, second)
            return
        is_first = self._first.is_first(rows)
        to_first, to_second = rows.views(*self._tensors)
        (to_first.copy_ if is_first else to_first.add_)(first)
        (to_second.copy_ if is_first else to_second.add_)(second)

    def add_slots(self, start: int, count: int, first: Tensor, second: Tensor) -> None:
        """Add what another rank returned for some slots, as `add` does."""
        self.add(Rows(start, 1, count), first, second)

    def whole(self) -> tuple[Tensor | None, ...]:
        """Return the only part of each, if it waits and has all slots."""
        return tuple(total.whole() for total in self._totals) or (None, None)

    def merge(self) -> None:
        """Add the parts that wait, because others will write to their memory."""
        for total in self._totals:
            total.merge()

    def so_far(self) -> Sequence[Tensor]:
        """Return the accumulators with all parts that have arrived."""
        if self._totals:
            return [total.so_far() for total in self._totals]
        self._first.finish()
        return self._tensors

    def finish(self) -> None:
        """Write the results."""
        for total in self._totals:
            total.finish()
        if self._totals:
            return
        if self._first.open:
            self._first.finish()
        if self._trace is not None:
            self._trace.accumulators_bytes -= self._apart_bytes
        for result, tensor in zip(self._results, self._tensors, strict=True):
            if tensor is not result:
                result.copy_(tensor)
