"""The layout of blocks of tokens, which are chosen as keys."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from ds_ring.errors import RingLayoutError, RingPatternError
from ds_ring.masks.slots import IntArray, repeat_rows
from ds_ring.patterns.documents.pattern import Documents
from ds_ring.schedule.layout import Layout


@dataclass(frozen=True)
class BlockLayout(Layout):
    """A layout of blocks of consecutive tokens: a block is on the rank of its first token.

    Blocks begin where the sequence or a document begins, and then at every `size`-th token. They are numbered
    in the order of positions; `tokens` counts them. Padding has no blocks.
    """

    size: int = field(kw_only=True)  # tokens of a block
    of: Layout = field(kw_only=True)  # of the tokens
    documents: Documents | None = field(kw_only=True, default=None)
    whole: bool = field(kw_only=True, default=True)  # omit the incomplete block at the end of a document

    name = "blocks"

    @classmethod
    def from_tokens(
        cls, layout: Layout, size: int, documents: Documents | None = None, whole: bool = True
    ) -> BlockLayout:
        """Return the layout of the blocks of the tokens of `layout`.

        Raises:
            RingLayoutError: shards that are not consecutive tokens.
            RingPatternError: no documents, those of another length, or a document that has gaps.
        """
        if documents is not None and not isinstance(documents, Documents):
            raise RingPatternError.wrong(
                "documents", "ds_ring.Documents", type(documents).__name__,
                "pass ds_ring.Documents(document_ids)",
            )  # fmt: skip
        for ring_rank in range(layout.ring_size):
            runs = layout.runs(ring_rank)
            if bool((runs[runs[:, 2] > 1, 1] != 1).any()):
                raise RingLayoutError(
                    f"{layout}: expected shards of consecutive positions, since keys are chosen by blocks of"
                    f' {size} tokens, got others; use the layout "zigzag", "contiguous" or "balanced"'
                )
        counts = cls._counts(layout.tokens, size, documents, whole)
        return cls(
            int(counts.sum()), layout.ring_size, size=size, of=layout, documents=documents, whole=whole
        )

    @staticmethod
    def _counts(tokens: int, size: int, documents: Documents | None, whole: bool) -> IntArray:
        """Return the number of blocks of each document."""
        if documents is None:
            lengths, ids = np.array([tokens]), np.array([0])
        else:
            if documents.tokens != tokens:
                raise RingPatternError.wrong("documents", f"{tokens} ids", documents.tokens, "use one length")
            lengths, ids = np.diff([*documents.starts, tokens]), np.array(documents.ids)
            real = ids[ids >= 0]
            if len(np.unique(real)) < len(real):
                raise RingPatternError.wrong(
                    "documents", "consecutive tokens", "one with a gap", "give each run an id of its own"
                )
        return np.where(ids >= 0, (lengths if whole else lengths + size - 1) // size, 0)

    @cached_property
    def starts(self) -> IntArray:
        """Return the position of each block's first token, int64 [tokens], ascending."""
        counts = self._counts(self.of.tokens, self.size, self.documents, self.whole)
        begins = np.array([0] if self.documents is None else self.documents.starts, dtype=np.int64)
        document, within = repeat_rows(counts)
        return begins[document] + within * self.size

    @cached_property
    def ends(self) -> IntArray:
        """Return the end of the document of each block, exclusive, int64 [tokens]."""
        edges = [self.of.tokens] if self.documents is None else [*self.documents.starts, self.of.tokens]
        borders = np.array(edges, dtype=np.int64)
        return borders[np.searchsorted(borders, self.starts, side="right")]

    def runs(self, ring_rank: int) -> IntArray:
        runs = self.of.runs(ring_rank)
        first, end = (np.searchsorted(self.starts, where) for where in (runs[:, 0], runs[:, 0] + runs[:, 2]))
        runs = np.stack([first, np.ones_like(first), end - first], axis=1)
        return runs[runs[:, 2] > 0]

    def __str__(self) -> str:
        return f"blocks of {self.size} tokens (whole={self.whole}, {self.documents}) of the {self.of}"
