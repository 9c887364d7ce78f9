"""Share a few numbers of each rank between all processes of a simulation: a file that is mapped to memory."""

from __future__ import annotations

import mmap
from array import array
from enum import IntEnum
from math import isnan, nan
from pathlib import Path


class Of(IntEnum):
    """Name the numbers of a rank; nan until they are known. Times are seconds since 1970."""

    PID = 0
    FORKED = 1
    JOINED = 2
    HAS_TORCH = 3
    RAISED = 4  # when the bug was raised
    TOLD = 5  # when it knew who had failed
    BLAMED = 6  # whom
    STATUS = 7  # of its end; minus n for signal n


class Figures:
    """Hold the numbers of all ranks of one attempt, and what they are to do.

    Args:
        path: of the file; it must not be there if `ranks` is given.
        ranks: makes the file for so many; None maps one that is there.
    """

    def __init__(self, path: Path, ranks: int | None = None) -> None:
        if ranks is not None:
            part = path.with_suffix(".part")  # whole once it has its name
            part.write_bytes(array("d", [nan] * ((ranks + 1) * len(Of))).tobytes())
            part.rename(path)
        with open(path, "r+b") as file:
            self._numbers = memoryview(mmap.mmap(file.fileno(), 0)).cast("d")
        self.ranks = len(self._numbers) // len(Of) - 1

    def note(self, rank: int, what: Of, value: float) -> None:
        """Write a number of a rank."""
        self._numbers[rank * len(Of) + what] = value

    def all(self, what: Of) -> list[float]:
        """Return that number of every rank."""
        return list(map(float, self._numbers[what : self.ranks * len(Of) : len(Of)]))

    def known(self, what: Of) -> dict[int, float]:
        """Return that number by rank, where it is known."""
        return {rank: value for rank, value in enumerate(self.all(what)) if not isnan(value)}

    # The row after the last rank's is for all.
    @property
    def order(self) -> str:
        """Return what the ranks are to do: "train", "raise" (the culprit), "finish"."""
        number = self._numbers[self.ranks * len(Of)]
        return "train" if isnan(number) else ("raise", "finish")[int(number)]

    @order.setter
    def order(self, word: str) -> None:
        self._numbers[self.ranks * len(Of)] = ("raise", "finish").index(word)
