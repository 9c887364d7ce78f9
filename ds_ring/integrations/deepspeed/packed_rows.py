"""Pack documents into rows of equal length, read only where somebody asks for their tokens.

Owns which document lies where in which row. Rows are made from lengths alone, the same on every rank.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from ds_ring.errors import RingConfigError
from ds_ring.integrations.deepspeed.packing import PADDING


class Piece(NamedTuple):
    """Place tokens `start` to `stop` of a document in a row, from its token `at` on."""

    document: int
    start: int
    stop: int
    at: int


class PackedRows(Dataset[dict[str, Tensor]]):
    """Hold rows of `tokens` tokens, made of whole documents; best fit, the longest first.

    A document longer than a row is cut into rows, which do not see each other. What is left of a row is
    padding. Rows are the same in every epoch; their order is the loader's.

    Raises:
        RingConfigError: lengths and documents differ in number, or a length is below 1.
    """

    def __init__(self, documents: Any, lengths: Sequence[int], tokens: int) -> None:
        lengths = [int(length) for length in lengths]
        if len(lengths) != len(documents) or min(lengths, default=0) < 1 or tokens < 1:
            raise RingConfigError(
                f"pack_tokens: expected a row of at least one token and the length, at least 1, of each of"
                f" {len(documents)} documents, got {tokens} and {len(lengths)} lengths from"
                f" {min(lengths, default=0)} on; leave empty documents out"
            )
        self.documents, self.tokens = documents, tokens
        self.rows = _best_fit(lengths, tokens)

    def __len__(self) -> int:
        return len(self.rows)

    def length(self, row: int) -> int:
        """Return the tokens of a row, padding included: of all rows alike."""
        return self.tokens

    def document_ids(self, row: int) -> Tensor:
        """Return the document of each token of a row, numbered within it, int64 [tokens]; padding is -1."""
        ids = torch.full((self.tokens,), PADDING)
        for number, piece in enumerate(self.rows[row]):
            ids[piece.at : piece.at + piece.stop - piece.start] = number
        return ids

    def slice(self, row: int, start: int, stop: int) -> dict[str, Tensor]:
        """Return tokens `start` to `stop` of a row by name; reads the documents that lie there."""
        found: dict[str, Tensor] = {"input_ids": torch.zeros(stop - start, dtype=torch.int64)}
        for piece in self.rows[row]:
            first = max(start, piece.at)
            last = min(stop, piece.at + piece.stop - piece.start)
            if first < last:
                shift = piece.start - piece.at
                part = part_of(self.documents, piece.document, first + shift, last + shift)
                for name, values in part.items():
                    found.setdefault(name, torch.zeros(stop - start, dtype=torch.int64))
                    found[name][first - start : last - start] = torch.as_tensor(values)
        return found


def part_of(dataset: Any, index: int, start: int, stop: int) -> Mapping[str, Any]:
    """Return tokens `start` to `stop` of a sample by name, by the data set's `slice` if it has one."""
    if hasattr(dataset, "slice"):
        part: Mapping[str, Any] = dataset.slice(index, start, stop)
        return part
    return {name: values[start:stop] for name, values in dataset[index].items()}


def _best_fit(lengths: Sequence[int], tokens: int) -> list[list[Piece]]:
    """Put each piece, the longest first, where it leaves least room."""
    pieces = [
        Piece(document, start, min(start + tokens, length), 0)
        for document, length in enumerate(lengths)
        for start in range(0, length, tokens)
    ]
    rows: list[list[Piece]] = []
    room: list[tuple[int, int]] = []  # (tokens left, row), sorted
    for index in np.argsort([piece.start - piece.stop for piece in pieces], kind="stable").tolist():
        piece = pieces[index]
        needed = piece.stop - piece.start
        place = bisect_left(room, (needed, -1))
        if place == len(room):
            left, row = tokens, len(rows)
            rows.append([])
        else:
            left, row = room.pop(place)
        rows[row].append(piece._replace(at=tokens - left))
        insort(room, (left - needed, row))
    return rows
