"""Track which partial result is the first one of its rows: it is assigned, so nothing needs to be zeroed.

Owns this bookkeeping, as intervals of slots on the host. The caller writes the partial results.

[Note: the first part of a row]
The first part of a row is assigned to the accumulator, and later ones are merged into it, so nothing is set
to zero before. Rows that no part covers are filled at the end.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ds_ring.runtime.kernels.interface import Rows


class FirstParts:
    """The slots of an accumulator that no partial result has been written to yet.

    Args:
        slots: number of slots of the accumulator, whose memory is uninitialised.
        fill: called with `given`, a first slot and an end, to write the neutral element to these slots: 0, or
            the result of attention over no key.
    """

    __slots__ = ("_fill", "_given", "_open")

    def __init__(self, slots: int, fill: Callable[..., None], *given: Tensor) -> None:
        self._open, self._fill, self._given = [(0, slots)] if slots else [], fill, given

    def is_first(self, rows: Rows, heads: slice = slice(None)) -> bool:
        """Return True if the part is the first on all of its rows, so it is assigned; else it is added.

        If the rows are not contiguous, belong to some heads only, or are partly written, the unwritten slots
        are filled with the neutral element here, and the part is added.
        """
        if not self._open:
            return False
        dense = rows.step == 1 and (rows.repeats == 1 or rows.stride == rows.length)
        if not dense or heads != slice(None):
            self.finish()
            return False
        start, end = rows.start, rows.start + rows.repeats * rows.length
        if self._open == [(start, end)]:  # the usual case
            self._open = []
            return True
        cut = [(max(a, start), min(b, end)) for a, b in self._open if a < end and start < b]
        self._open = [
            piece
            for a, b in self._open
            for piece in ((a, min(b, start)), (max(a, end), b))
            if piece[0] < piece[1]
        ]
        if cut == [(start, end)]:
            return True
        for piece in cut:
            self._fill(*self._given, *piece)
        return False

    def finish(self) -> None:
        """Fill the slots that were never written."""
        for piece in self._open:
            self._fill(*self._given, *piece)
        self._open = []
