"""A table of ids as a primitive: a token's label is the id of its document, or of its node of a tree."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ds_ring.masks.branches import Pieces, Primitive, each_number
from ds_ring.masks.slots import IntArray
from ds_ring.masks.tiles import Axis


@dataclass(frozen=True)
class Table(Primitive):
    """Label every position of one sequence by a table of ids; tokens with a negative id take no part.

    The ids are the labels, so those of two tables may be compared. They may come in any order.
    """

    tile_kind = (1, "documents")
    starts: tuple[int, ...]  # positions at which the id changes, ascending, the first 0
    ids: tuple[int, ...]  # the id from each start to the next, -1 up to `LARGEST_LABEL`; it may occur again
    tokens: int  # length T of the sequence, and the only one that a pattern with this table fits

    @cached_property
    def _stretches(self) -> tuple[IntArray, IntArray, IntArray, bool]:
        """Return start, end and label of every stretch of one id, and whether each label is its number."""
        starts, ids = np.array(self.starts, dtype=np.int64), np.array(self.ids, dtype=np.int64)
        numbered = bool(((ids == np.arange(len(ids))) | (ids < 0)).all())
        return starts, np.append(starts[1:], self.tokens), ids, numbered

    def labels(self, positions: IntArray) -> IntArray:
        starts, _, label, _ = self._stretches
        return label[np.searchsorted(starts, positions, side="right") - 1]

    def bounds(self, axis: Axis) -> tuple[IntArray, IntArray]:
        _, _, labels, numbered = self._stretches
        # An id that occurs twice may be anywhere in the sequence, so there are no useful bounds.
        if not numbered:
            return np.zeros_like(axis.position), np.full_like(axis.position, labels.max(initial=0))
        return self._find_stretch(axis.position), self._find_stretch(axis.last_position)

    def split(self, axis: Axis, least: IntArray, greatest: IntArray) -> Pieces:
        starts, ends, labels, numbered = self._stretches
        low, high = self._find_stretch(axis.position), self._find_stretch(axis.last_position)
        if numbered:  # cut each row only at the documents of interest, not at all that it spans
            low, high = np.maximum(low, least), np.minimum(high, greatest)
        row, stretch = each_number(low, high)
        held = labels[stretch] >= 0
        row, stretch = row[held], stretch[held]
        return Pieces(row, axis.rows(row).between(starts[stretch], ends[stretch]), labels[stretch])

    @property
    def only_length(self) -> int:
        return self.tokens

    def is_apart_from(self, other: Primitive) -> bool:
        if not isinstance(other, Table):
            return False
        mine, theirs = np.array(self.ids), np.array(other.ids)
        return self.starts == other.starts and not ((mine >= 0) & (theirs >= 0)).any()

    def _find_stretch(self, positions: IntArray) -> IntArray:
        return np.searchsorted(self._stretches[0], positions, side="right") - 1
