"""The multiplicity m of a pair (how often it counts), if m varies inside a tile: a function of positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ds_ring.masks.slot_ranges import IntArray


@dataclass(frozen=True)
class Weights:
    """The multiplicity m of a pair: the number of residue classes that contain both of its positions.

    Attributes:
        classes: (residue, modulus) of every class; each modulus is a multiple of the one before it.
    """

    classes: tuple[tuple[int, int], ...]

    @property
    def period(self) -> int:
        """Return the shift of positions after which m repeats."""
        # Each modulus divides the next, so the last one is their least common multiple.
        return self.classes[-1][1]

    def __call__(self, q: Any, k: Any) -> Any:
        """Return m, broadcast over query and key positions (arrays or tensors of int64)."""
        return sum(((q % m == r) & (k % m == r)) * 1 for r, m in self.classes)

    def varies(self, position_step: IntArray, length: IntArray) -> IntArray:
        """Return whether a progression of positions has (or may have) members of different classes."""
        # A step that is a multiple of the period stays in its class.
        varies: IntArray = (position_step % self.period != 0) & (length > 1)
        return varies
