"""Know which partial result is the first one of its rows, so that it is assigned and nothing is zeroed.

Owns that bookkeeping, by intervals of slots on the host. What a part is written to is its caller's.

[Note: the first part of a row]
The first part of a row is assigned to the accumulator, and later ones are merged into it, so nothing is set
to zero before. Rows that no part covers are filled at the end.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ds_ring.runtime.kernels.interface import Rows


class FirstParts:
    """Hold which slots of an accumulator nobody has written yet.

    Args:
        slots: of the accumulator, whose memory may hold anything.
        fill: called with `given`, the first slot and the end of slots that must hold the neutral element now:
            0, or attention over no key.
    """

    __slots__ = ("_fill", "_given", "_open")

    def __init__(self, slots: int, fill: Callable[..., None], *given: Tensor) -> None:
        self._open, self._fill, self._given = [(0, slots)] if slots else [], fill, given

    def is_first(self, rows: Rows, heads: slice = slice(None)) -> bool:
        """Return whether a part is the first one on all of its rows: then it is assigned, otherwise added.

        Rows that lie scattered, some heads' only, or written in part are filled here, and the part is added.
        """
        if not self._open:
            return False
        dense = rows.step == 1 and (rows.repeats == 1 or rows.stride == rows.length)
        if not dense or heads != slice(None):
            self.finish()
            return False
        start, end = rows.start, rows.start + rows.repeats * rows.length
        if self._open == [(start, end)]:  # as most are
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
        """Fill what nobody has written."""
        for piece in self._open:
            self._fill(*self._given, *piece)
        self._open = []
