"""The layout of packed documents, each cut zigzag by itself: even work for documents of different lengths."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ds_ring.errors import RingLayoutError
from ds_ring.masks.partitions import Table
from ds_ring.masks.pattern import Head, Pattern
from ds_ring.schedule.choose import in_words
from ds_ring.schedule.layout import Layout, Mix, PieceLayout


@dataclass(frozen=True)
class DocumentZigzag(PieceLayout):
    """Give rank p chunks p and 2P - 1 - p of the 2P chunks of every document."""

    @property
    def name(self) -> str:
        return "document_zigzag"


def make_document_zigzag(tokens: int, ring_size: int, multiple_of: int, mix: Mix) -> Layout:
    """Cut every document of a pattern (alone, in a composition, or in some layers) into 2P chunks.

    Raises:
        RingLayoutError: no documents in the pattern, or documents of a sequence of another length.
    """
    tables = list(dict.fromkeys(table for pattern, _ in mix for table in _tables_in(pattern)))
    if not tables:
        raise RingLayoutError(
            f'layout "document_zigzag" cuts the documents of a pattern, got {in_words(mix) or None};'
            ' give a pattern with Documents(...), in the JSON "documents": true, or take "auto"'
        )
    if {table.tokens for table in tables} != {tokens}:
        raise RingLayoutError(
            f'layout "document_zigzag": expected documents of {tokens} tokens, got'
            f" {', '.join(str(table.tokens) for table in tables)}; pass the length that they have"
        )
    starts = np.unique([start for table in tables for start in table.starts])
    length, chunks = np.diff(starts, append=tokens), 2 * ring_size
    chunk = np.arange(chunks)
    # What does not divide goes round: the next document goes on with the chunk after the last one that got a
    # token more, so that ranks differ by at most two tokens however many short documents there are.
    more = (chunk - starts[:, None]) % chunks < (length % chunks)[:, None]
    lengths = (length[:, None] // chunks + more).reshape(-1)
    owners = np.tile(np.minimum(chunk, chunks - 1 - chunk), len(starts))
    kept = lengths > 0  # a document of fewer tokens has empty chunks
    boundaries = (0, *np.cumsum(lengths[kept]).tolist())
    return DocumentZigzag(tokens, ring_size, multiple_of, boundaries, tuple(owners[kept].tolist()))


def _tables_in(pattern: Pattern) -> list[Table]:
    """Return the tables of ids that tell what may attend to what, each once."""
    sides = (side for branch in pattern.branches(Head()) for side in (branch.queries, branch.keys))
    return list(dict.fromkeys(one for side in sides for one in side.primitives if isinstance(one, Table)))
