"""Packed documents: a token attends only within its own document. Owns that pattern and nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ds_ring.errors import RingPatternError, shown
from ds_ring.masks.branches import Branch, alike
from ds_ring.masks.partitions import Table
from ds_ring.masks.pattern import Head, IntArray, Pattern


@dataclass(frozen=True)
class Documents(Pattern):
    """Attend within one document only; a negative id marks padding, which sees nothing.

    Attributes:
        starts, ids, tokens: stretches of equal ids, as in `Table`.
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
            # a position that does not follow the one before it begins a document
            values = np.cumsum(np.diff(values, prepend=-1) != 1)
        starts = np.flatnonzero(np.diff(values, prepend=values[0] - 1))
        object.__setattr__(self, "starts", tuple(starts.tolist()))
        object.__setattr__(self, "ids", tuple(values[starts].tolist()))
        object.__setattr__(self, "tokens", len(values))

    @cached_property
    def _table(self) -> Table:
        """Keep the table, since what it derives from the ids is kept with it."""
        return Table(self.starts, self.ids, self.tokens)

    def branches(self, head: Head) -> tuple[Branch, ...]:
        return (alike(self._table),)

    def __str__(self) -> str:
        # numbers hash alike in every process, and ranks compare this text
        digest = hash((self.starts, self.ids))
        return f"Documents({len(self.starts)} stretches of {self.tokens} tokens, {digest})"


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
    # as int64 these would be negative, which means padding
    if array.dtype == np.uint64 and int(array.max()) >= 1 << 63:
        raise RingPatternError(f"Documents: expected integers below 2**63, got {int(array.max())}")
    return array.astype(np.int64)
