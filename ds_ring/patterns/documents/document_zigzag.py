"""The layout of packed documents: every rank has two chunks of every document."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ds_ring.errors import RingLayoutError
from ds_ring.patterns.documents.table import Table
from ds_ring.schedule.choose import describe_mix
from ds_ring.schedule.layout import Layout, Mix
from ds_ring.schedule.pieces import PieceLayout


@dataclass(frozen=True)
class DocumentZigzag(PieceLayout):
    """Give rank p chunks p and 2P - 1 - p of the 2P chunks of every document: even work for any lengths."""

    name = "document_zigzag"


def make_document_zigzag(tokens: int, ring_size: int, multiple_of: int, mix: Mix) -> Layout:
    """Cut every document of a pattern (alone, in a composition, or in some layers) into 2P chunks."""
    primitives = dict.fromkeys(part for pattern, _ in mix for part in pattern.primitives)
    tables = [part for part in primitives if isinstance(part, Table)]
    if not tables:
        raise RingLayoutError(
            'layout "document_zigzag": expected a pattern with Documents(...), in the JSON "documents":'
            f' true, got {describe_mix(mix) or None}; give one, or take "auto"'
        )
    if {table.tokens for table in tables} != {tokens}:
        raise RingLayoutError(
            f'layout "document_zigzag": expected documents of {tokens} tokens, got'
            f" {', '.join(str(table.tokens) for table in tables)}; pass the length that they have"
        )
    starts = np.unique([start for table in tables for start in table.starts])
    length, chunks = np.diff(starts, append=tokens), 2 * ring_size
    chunk = np.arange(chunks)
    # Remainders are dealt round-robin: the next document continues with the chunk after the last one that got
    # an extra token. So ranks differ by at most two tokens even with many short documents.
    extra = (chunk - starts[:, None]) % chunks < (length % chunks)[:, None]
    lengths = (length[:, None] // chunks + extra).reshape(-1)
    owners = np.tile(np.minimum(chunk, chunks - 1 - chunk), len(starts))
    filled = lengths > 0  # a document of fewer tokens has empty chunks
    boundaries = (0, *np.cumsum(lengths[filled]).tolist())
    return DocumentZigzag(tokens, ring_size, multiple_of, boundaries, tuple(owners[filled].tolist()))
