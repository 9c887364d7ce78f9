"""Find the packed documents of a batch, and group its rows by them.

Owns the document of every token (read off ids, positions or padding), the positions that restart and the
labels that a border takes away, and the rows of a batch put together by equal documents: core's `Documents`
is one sequence, so a batch of several is a few patterns. Pure: no collective, no model.

Shapes: B samples, T global tokens.

[Note: rows of a batch]
Documents are known where whole batches are seen, so every rank makes the same patterns without a message.
Rows with equal documents are one pass. All rows share one layout: that of the rows with the most work.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from operator import and_
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from ds_ring.comm.device_tables import on_device
from ds_ring.errors import RingConfigError, RingPatternError, RingShapeError
from ds_ring.layers.scores import AlongPaths, Softcap
from ds_ring.masks.catalog import Causal, Chunked, Full
from ds_ring.masks.pair_masks import ScoreFunction
from ds_ring.masks.pattern import Pattern
from ds_ring.patterns.documents.pattern import Documents, Tree
from ds_ring.plugin import ROW_KINDS, load

DOCUMENT_IDS = "document_ids"
PADDING = -1  # the document of tokens that belong to none


class RowPattern(Protocol):
    """A pattern of rows other than documents: it says what a layer has with it."""

    @property
    def pairs(self) -> int:
        """Return the pairs of a query and a key: what attention costs."""

    def narrowed(self, layer_pattern: Pattern) -> Pattern:
        """Return the pattern of a layer that asks for one; RingPatternError for one that it cannot have."""


class RowGroup(NamedTuple):
    """Hold rows of a batch that attend alike; one ring pass."""

    pattern: Any  # `Documents`, or a `RowPattern`: narrows the pattern of every layer
    rows: tuple[int, ...]  # of the local batch, ascending

    def narrowed(self, layer_pattern: Pattern) -> Pattern:
        """Return the pattern of these rows where a layer asks for one.

        Raises:
            RingPatternError: a pattern that such rows cannot have, as trees of rollouts along their paths.
        """
        if not isinstance(self.pattern, Documents):
            row_pattern: RowPattern = self.pattern
            return row_pattern.narrowed(layer_pattern)
        chunks = [part for part in layer_pattern.conjuncts if isinstance(part, Chunked)]
        for chunk in chunks:  # they begin with each document, not with the row
            rest = [part for part in layer_pattern.conjuncts if part is not chunk]
            layer_pattern = reduce(and_, rest, Causal() if chunk.causal else Full()) & _in_chunks(
                self.pattern, chunk
            )
        return layer_pattern & self.pattern

    def counted(self, layer_pattern: Pattern) -> Pattern:
        """Return the pattern by which a layout is chosen where a layer asks for one."""
        return (
            layer_pattern & self.pattern
            if isinstance(self.pattern, Pattern)
            else self.narrowed(layer_pattern)
        )

    def along_paths(self, score_mod: ScoreFunction | None) -> ScoreFunction | None:
        """Return a layer's score_mod for these rows: in trees a distance is one of depths."""
        if score_mod is None or isinstance(score_mod, Softcap) or isinstance(self.pattern, Documents):
            return score_mod
        if not isinstance(self.pattern, Tree):
            raise RingPatternError.wrong(
                "a layer", f"no ALiBi with {self.pattern}", "it", "take a model with rotary positions"
            )
        return AlongPaths(score_mod, torch.from_numpy(self.pattern.depths))

    @property
    def documents(self) -> Documents:
        """Return the documents, for layers that read blocks of a row.

        Raises:
            RingPatternError: the rows are trees, or other ones than documents.
        """
        refuse_trees([self])
        documents: Documents = self.pattern
        return documents


def refuse_trees(groups: Sequence[RowGroup]) -> None:
    """Raise RingPatternError unless rows are documents: for layers that read blocks of consecutive tokens."""
    if any(isinstance(group.pattern, Tree) for group in groups):
        raise RingPatternError.wrong(
            "a layer", "no blocks of tokens with a tree", "them", "pass rollouts as rows"
        )
    others = [group.pattern for group in groups if not isinstance(group.pattern, Documents)]
    if others:
        raise RingPatternError.wrong("a layer", "softmax attention", str(others[0]), "take another model")


def check_ids(document_ids: Tensor) -> None:
    """Raise RingShapeError unless there is one integer for each token."""
    if document_ids.ndim != 2 or document_ids.is_floating_point() or document_ids.dtype == torch.bool:
        raise RingShapeError(
            f"batch[{DOCUMENT_IDS!r}]: expected integers [samples, tokens], equal within a document, got"
            f" {str(document_ids.dtype).removeprefix('torch.')} {list(document_ids.shape)}"
        )


def ids_from_positions(position_ids: Tensor) -> Tensor:
    """Number the documents of tokens whose positions restart: [B, T], rising at every break."""
    breaks = torch.nn.functional.pad(position_ids.diff(dim=1) != 1, (1, 0))
    return breaks.cumsum(dim=1)


def positions_in_documents(document_ids: Tensor) -> Tensor:
    """Count the tokens of its own document before each token, [B, T]; padding counts like a document."""
    rows = []
    for ids_T in document_ids.cpu().numpy():
        starts, lengths = _find_id_runs(ids_T)
        before, counted = np.empty_like(starts), defaultdict[int, int](int)
        for index, (document, length) in enumerate(
            zip(ids_T[starts].tolist(), lengths.tolist(), strict=True)
        ):
            before[index] = counted[document]
            counted[document] += length
        rows.append(np.arange(len(ids_T)) - np.repeat(starts - before, lengths))
    return on_device(np.stack(rows), document_ids.device)


def without_padding(document_ids: Tensor, mask_BT: Tensor) -> Tensor:
    """Return the documents, tokens that an attention_mask hides taken out of them."""
    if mask_BT.numel() and int(mask_BT.max()) > 1:
        raise RingPatternError.wrong("attention_mask", "0 and 1", int(mask_BT.max()), f"use {DOCUMENT_IDS}")
    return document_ids.masked_fill(~mask_BT.bool(), PADDING)


# [Note: packing]
# With "documents": true in the JSON's "pattern" a token attends within its own document only. Documents come
# from `document_ids` [B, T] in the batch (equal within a document; negative: padding, which sees nothing and
# is not seen), or else from `position_ids` that restart. Given ids and no positions, positions count within
# each document, as Hugging Face packs. Where the document changes between tokens t and t + 1 the label that
# token t predicts is -100 (Hugging Face's packing collators do the same): a document cannot predict how the
# next one begins. An attention_mask marks padding. A model never sees `document_ids`: its attention gets
# them as patterns.
def has_no_label(document_ids: Tensor) -> Tensor:
    """Return bool [B, T]: padding, and the last token of every run of a document; see [Note: packing]."""
    ends = torch.nn.functional.pad(document_ids.diff(dim=1) != 0, (0, 1), value=True)
    return ends | (document_ids < 0)


class RowKind(ABC):
    """Rows whose pattern is in a tensor of the batch other than `document_ids`: a row of `ROW_KINDS`.

    Attributes:
        key: the name of the tensor, [B, T] or [1, T].
    """

    key = ""

    @abstractmethod
    def check(self, tensors: dict[str, Tensor], pattern: Pattern, has_more: bool) -> None:
        """Check the tensor; add position ids if there are none. `has_more`: there are documents or a mask.

        Raises:
            RingPatternError, RingShapeError: a combination that is not supported.
        """

    @abstractmethod
    def make_row_pattern(self, row_T: np.ndarray) -> RowPattern:
        """Return the pattern of one row of the tensor."""


def _in_chunks(documents: Documents, chunk: Chunked) -> Documents:
    """Return chunks that begin with each document of a row as documents of their own."""
    real = [number for number in documents.ids if number >= 0]
    if len({*real}) < len(real):
        raise RingPatternError.wrong(
            "documents", f"tokens in one place with {chunk}", "a document in several", "put them together"
        )
    ends = [*documents.starts[1:], documents.tokens]
    places = [np.arange(end - start) for start, end in zip(documents.starts, ends, strict=True)]
    chunks = np.concatenate([place // chunk.chunk for place in places])
    numbers = np.repeat(np.arange(len(places)), [len(place) for place in places])
    is_padding = np.repeat(np.array(documents.ids) < 0, [len(place) for place in places])
    return Documents(np.where(is_padding, PADDING, numbers * (int(chunks.max()) + 1) + chunks))


def number_positions(pattern: Any, slots_S: Tensor) -> Tensor:
    """Return the numbers of tokens of a row in their document, or their path, by their places in the row."""
    if isinstance(pattern, Tree):
        return torch.from_numpy(pattern.depths)[slots_S]
    if not isinstance(pattern, Documents):
        return slots_S
    starts = torch.tensor(pattern.starts, device="cpu")
    return slots_S - starts[torch.searchsorted(starts, slots_S.clamp(min=0), right=True) - 1]


def row_kind(tensors: Mapping[str, Tensor]) -> RowKind | None:
    """Return the kind of rows of a batch; None for plain rows and documents."""
    home = next((home for key, home in ROW_KINDS.items() if key in tensors), None)
    return None if home is None else load(home)()


def group_rows(
    ids: Tensor, batch_rows: int, of_row: Callable[[np.ndarray], Any] | None = None
) -> tuple[RowGroup, ...]:
    """Group rows with equal documents, or trees; the group whose attention is most work comes first.

    `ids` are [B, T], or [1, T] for all rows alike: document ids, or the input of `of_row`.
    """
    documents = [(of_row or _documents)(row) for row in ids.cpu().numpy()]
    if len(documents) == 1:
        documents *= batch_rows
    rows_of: dict[Any, list[int]] = {}
    for row, row_documents in enumerate(documents):
        rows_of.setdefault(row_documents, []).append(row)
    groups = sorted(rows_of.items(), key=lambda group: -_pairs(group[0]))
    return tuple(RowGroup(row_documents, tuple(rows)) for row_documents, rows in groups)


def group_batch(prepared: Mapping[str, Tensor], samples: int) -> tuple[RowGroup, ...]:
    """Group the rows of a prepared batch by their documents, or trees; none without any."""
    kind = row_kind(prepared)
    ids = prepared.get(DOCUMENT_IDS if kind is None else kind.key)
    return () if ids is None else group_rows(ids, samples, None if kind is None else kind.make_row_pattern)


def _documents(ids_T: np.ndarray) -> Documents:
    """Number documents in their order, so that the pattern depends on their borders, not on their ids."""
    starts, lengths = _find_id_runs(ids_T)
    _, first, number = np.unique(ids_T[starts], return_index=True, return_inverse=True)
    numbers = np.where(ids_T[starts] < 0, PADDING, first[number])
    return Documents(np.repeat(numbers, lengths))


def check_losses(losses: Tensor, batch: Mapping[str, Tensor], groups: Sequence[RowGroup]) -> None:
    """Raise a typed error for losses that do not fit a sharded batch, or a batch that has no documents."""
    labels = batch.get("shift_labels")
    if labels is None or losses.shape != labels.shape or not losses.is_floating_point():
        raise RingShapeError(
            "document_losses: expected one loss for each local token of a batch with shift_labels,"
            f" {'none' if labels is None else list(labels.shape)}, got {losses.dtype} {list(losses.shape)}"
        )
    if not all(isinstance(group.pattern, Documents) for group in groups):
        raise RingPatternError("document_losses: expected documents, got a tree; use tree.of_rollouts")


def number_documents(groups: Sequence[RowGroup], rows: int, tokens: int) -> np.ndarray:
    """Return the number of each token's document, int64 [rows, tokens]; -1 for padding.

    Row by row documents are numbered in the order in which they begin. A row in no group is one document.
    """
    of_row = {row: group.documents for group in groups for row in group.rows}
    numbers, count = np.empty((rows, tokens), dtype=np.int64), 0
    for row, of_tokens in enumerate(numbers):
        if row in of_row:
            documents = of_row[row]
            of_runs = np.array(documents.ids)  # by the first run of each document
            names, number = np.unique(of_runs[of_runs >= 0], return_inverse=True)
            of_runs[of_runs >= 0] = count + number
            of_tokens[:] = np.repeat(of_runs, np.diff(documents.starts, append=documents.tokens))
            count += len(names)
        else:
            of_tokens[:], count = count, count + 1
    return numbers


def _find_id_runs(ids_T: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return start and length of every run of equal ids."""
    starts = np.append(0, np.flatnonzero(ids_T[1:] != ids_T[:-1]) + 1)
    return starts, np.diff(starts, append=len(ids_T))


def _pairs(documents: Any) -> int:
    """Count the query and key pairs: what attention costs, but for the static pattern."""
    if not isinstance(documents, Documents):
        return int(documents.pairs)
    ids = np.array(documents.ids)
    lengths = np.diff(documents.starts, append=documents.tokens)[ids >= 0]
    tokens = np.bincount(ids[ids >= 0], weights=lengths) if len(lengths) else np.zeros(1)
    return int((tokens**2).sum())


# Pack documents into rows of equal length, by their lengths alone: the same on every rank.


class DocumentPart(NamedTuple):
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
                f"pack_tokens: expected the length, at least 1, of each of {len(documents)} documents, got a"
                f" row of {tokens} and {len(lengths)} lengths from {min(lengths, default=0)} on"
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
        ids = torch.full((self.tokens,), PADDING, device="cpu")
        for number, piece in enumerate(self.rows[row]):
            ids[piece.at : piece.at + piece.stop - piece.start] = number
        return ids

    def slice(self, row: int, start: int, stop: int) -> dict[str, Tensor]:
        """Return tokens `start` to `stop` of a row by name; reads only the documents in this range."""
        tensors: dict[str, Tensor] = {"input_ids": torch.zeros(stop - start, dtype=torch.int64, device="cpu")}
        for piece in self.rows[row]:
            first = max(start, piece.at)
            last = min(stop, piece.at + piece.stop - piece.start)
            if first < last:
                shift = piece.start - piece.at
                part = read_part(self.documents, piece.document, first + shift, last + shift)
                for name, values in part.items():
                    tensors.setdefault(name, torch.zeros(stop - start, dtype=torch.int64, device="cpu"))
                    tensors[name][first - start : last - start] = torch.as_tensor(values, device="cpu")
        return tensors


def read_part(dataset: Any, index: int, start: int, stop: int) -> Mapping[str, Any]:
    """Return tokens `start` to `stop` of a sample by name, by the data set's `slice` if it has one."""
    if hasattr(dataset, "slice"):
        part: Mapping[str, Any] = dataset.slice(index, start, stop)
        return part
    return {name: values[start:stop] for name, values in dataset[index].items()}


def _best_fit(lengths: Sequence[int], tokens: int) -> list[list[DocumentPart]]:
    """Put each piece, the longest first, where it leaves least room."""
    pieces = [
        DocumentPart(document, start, min(start + tokens, length), 0)
        for document, length in enumerate(lengths)
        for start in range(0, length, tokens)
    ]
    rows: list[list[DocumentPart]] = []
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
