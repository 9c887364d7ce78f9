"""Packed documents: a token attends only within its own document. Owns that pattern and nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ds_ring.errors import RingPatternError, shown
from ds_ring.masks.mask_rule import NO_CLASS
from ds_ring.masks.pattern import IntArray, Pattern
from ds_ring.masks.tiles import Tiles, repeat_rows


@dataclass(frozen=True)
class Documents(Pattern):
    """A token attends only to tokens of its own document; a negative id marks padding, which sees nothing.

    Attributes:
        starts: positions at which an id begins, ascending, the first 0.
        ids: id of each of these stretches; one id may have several.
        tokens: length T of the sequence.
    """

    starts: tuple[int, ...]
    ids: tuple[int, ...]
    tokens: int

    def __init__(self, document_ids: Any | None = None, *, position_ids: Any | None = None) -> None:
        """Read the documents off one packed sequence.

        Args:
            document_ids: int [T] or [1, T], equal within a document.
            position_ids: int [T] or [1, T] that restart at 0 with every document, as Hugging Face packs.

        Raises:
            RingPatternError: neither or both given, or not one sequence of integers.
        """
        if (document_ids is None) == (position_ids is None):
            got = "neither" if document_ids is None else "both"
            raise RingPatternError(
                f"Documents: expected one of the two, got {got}: give exactly one of document_ids and"
                " position_ids"
            )
        values = _one_sequence(document_ids if position_ids is None else position_ids)
        if position_ids is not None:
            values = np.cumsum(np.diff(values, prepend=-1) != 1)
        starts = np.flatnonzero(np.diff(values, prepend=values[0] - 1))
        object.__setattr__(self, "starts", tuple(starts.tolist()))
        object.__setattr__(self, "ids", tuple(values[starts].tolist()))
        object.__setattr__(self, "tokens", len(values))

    @cached_property
    def _stretches(self) -> tuple[IntArray, IntArray, IntArray, IntArray]:
        """Start, end, first row in the join and number of rows in it, of every stretch."""
        starts = np.array(self.starts, dtype=np.int64)
        ids = np.array(self.ids, dtype=np.int64)
        order = np.argsort(ids, kind="stable")
        first = np.searchsorted(ids[order], ids, side="left")
        count = np.where(ids < 0, 0, np.searchsorted(ids[order], ids, side="right") - first)
        return starts, order, first, count

    @property
    def known_tokens(self) -> tuple[int, ...]:
        return (self.tokens,)

    def refine(self, tiles: Tiles) -> Tiles:
        starts, order, first, count = self._stretches
        ends = np.append(starts[1:], self.tokens)
        low = np.searchsorted(starts, tiles.q.position, side="right") - 1
        high = np.searchsorted(starts, tiles.q.last_position, side="right") - 1
        row, which = repeat_rows(high - low + 1)
        stretch = low[row] + which
        tiles = tiles.rows(row)
        tiles, stretch = _keep(tiles, tiles.q.between(starts[stretch], ends[stretch]), stretch)
        row, which = repeat_rows(count[stretch])
        partner = order[first[stretch[row]] + which]
        tiles = tiles.rows(row)
        return tiles.sides(tiles.q, tiles.k.between(starts[partner], ends[partner]))

    def labels(self, positions: IntArray) -> IntArray:
        ids = np.array(self.ids, dtype=np.int64)
        numbers = np.where(ids < 0, NO_CLASS, np.unique(ids, return_inverse=True)[1])
        return numbers[np.searchsorted(self.starts, positions, side="right") - 1][None, None]

    def multiplicity(self, head: int, query_heads: int, kv_heads: int, q: Any, k: Any) -> Any:
        per_token = np.repeat(self.ids, np.diff(np.append(self.starts, self.tokens)))
        q_id, k_id = (per_token[np.maximum(x, 0)] for x in (q, k))
        return ((q_id == k_id) & (q_id >= 0)).astype(np.int64)

    def __str__(self) -> str:
        digest = hash((self.starts, self.ids))
        return f"Documents({len(self.starts)} stretches of {self.tokens} tokens, {digest})"


def _keep(tiles: Tiles, q: Any, stretch: IntArray) -> tuple[Tiles, IntArray]:
    keep = q.length > 0
    return tiles.sides(q, tiles.k), stretch[keep]


def _one_sequence(values: Any) -> IntArray:
    try:
        array = np.asarray(values)
    except Exception as error:
        raise RingPatternError(
            f"Documents: expected integers of shape [T] or [1, T], got {shown(values)}"
            f" ({type(error).__name__} in numpy); pass a list, a numpy array or a tensor on the CPU"
        ) from error
    if array.ndim == 2 and len(array) == 1:
        array = array[0]
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer) or not len(array):
        raise RingPatternError(
            f"Documents: expected integers of shape [T] or [1, T], got {array.dtype} of shape {array.shape};"
            " for a batch of several packed sequences make one Documents for each"
        )
    if array.dtype == np.uint64 and int(array.max()) >= 1 << 63:
        raise RingPatternError(f"Documents: expected integers below 2**63, got {int(array.max())}")
    return array.astype(np.int64)
