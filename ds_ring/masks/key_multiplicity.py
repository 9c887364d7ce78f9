"""How often a pair is attended, where that varies inside a tile: a function of positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ds_ring.masks.slot_ranges import IntArray


@dataclass(frozen=True)
class Weights:
    """Count m of a pair: the number of classes that hold both of its positions.

    Attributes:
        classes: (residue, modulus) of every class, each modulus a multiple of the one before it.
    """

    classes: tuple[tuple[int, int], ...]

    @property
    def period(self) -> int:
        """Return the distance at which positions are alike."""
        # each modulus divides the next, so the last one is their least common multiple
        return self.classes[-1][1]

    def __call__(self, q: Any, k: Any) -> Any:
        """Return m, broadcast over query and key positions (arrays or tensors of int64)."""
        return sum(((q % m == r) & (k % m == r)) * 1 for r, m in self.classes)

    def varies(self, position_step: IntArray, length: IntArray) -> IntArray:
        """Return where a progression of positions has members of different classes (or might have)."""
        # steps of a multiple of the period never leave a class
        varies: IntArray = (position_step % self.period != 0) & (length > 1)
        return varies
