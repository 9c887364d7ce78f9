"""Windows of tokens that begin with each document, on the shards of a layout: which rank has which part.

A window is `rate` consecutive tokens of a document. The last one of a document may be incomplete, and gives
no entry. A fragment is what one run of a shard has of a window: mostly all of it. Fragments are a sequence of
their own, whose layout follows from that of the tokens, for any layout of consecutive tokens. The entry of a
window is in the slot of its last fragment. Pure data, for rows that have the same documents.

Shapes: S local tokens, F fragments, n local fragments, R local runs, m windows of which entries are computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ds_ring.errors import RingPatternError
from ds_ring.layers.scan.sequence_runs import SequenceRuns, sequence_runs
from ds_ring.masks.branches import Branch, labelled
from ds_ring.masks.catalog import Before
from ds_ring.masks.pattern import Pattern, QueryHead
from ds_ring.masks.slots import IntArray, repeat_rows
from ds_ring.patterns.documents.pattern import Documents
from ds_ring.patterns.documents.table import Table
from ds_ring.schedule.layout import Layout, expand_runs
from ds_ring.schedule.pieces import PieceLayout


@dataclass(frozen=True)
class Entries(Pattern):
    """Attend to entries of the own document, `apart` fragments or more before the query."""

    queries: Table
    keys: Table
    apart: int

    def branches(self, head: QueryHead) -> tuple[Branch, ...]:
        return (Branch(labelled(self.queries), labelled(self.keys), least=self.apart),)

    def __str__(self) -> str:
        # tuples of ints have the same hash in every process, and ranks compare this text
        digest = hash((self.queries.starts, self.keys.starts, self.keys.ids))
        return f"Entries({self.apart} apart, {self.queries.tokens} fragments, {digest})"


class Places(NamedTuple):
    """Where the tokens of a rank are in its fragments, [rate, n], and the reverse.

    Attributes:
        tokens: the slot of the token in each place of each fragment, int64 [rate * n]; 0 where there is none.
        places: the index in `tokens` of each slot's token, int64 [S]; 0 where its document has no entry.
        outside: whether that is so, bool [S].
    """

    tokens: IntArray
    places: IntArray
    outside: np.ndarray


class Sources(NamedTuple):
    """The windows of which a rank computes entries, in the order in which a compressor takes them.

    Attributes:
        tokens: of each window, indices into the S slots followed by the R halos, int64 [m, rate].
        positions: of each window's first token in its document, int64 [m].
        hidden: whether the window stands for the one before a document, bool [m].
        windows: the window of each slot of the fragments, int64 [n]; any where there is no entry.
    """

    tokens: IntArray
    positions: IntArray
    hidden: np.ndarray
    windows: IntArray


class Windows:
    """The windows of a sequence on the shards of a layout; int64 [F] each.

    Attributes:
        rate: tokens of a window.
        firsts: position of the first token of each fragment's window.
        numbers: number of the window in its document.
        documents: of each fragment, numbered from 0 on; those without an entry are left out.
        starts, ends: positions of each fragment.
        run: of each fragment.
        is_last: whether it is the last fragment of its window; has_entry: the window is complete, too.
        layout: of the fragments; None if there are no entries.

    Raises:
        RingPatternError: documents of another length, or a document in several places.
        RingLayoutError: shards that are not consecutive tokens.
    """

    def __init__(self, layout: Layout, rate: int, documents: Documents | None = None) -> None:
        self.rate, self._tokens = rate, layout
        begins, lengths = _find_whole_documents(layout.tokens, rate, documents)
        self.documents, numbers = repeat_rows(-(-lengths // rate))
        firsts = begins[self.documents] + numbers * rate
        ends = np.minimum(firsts + rate, (begins + lengths)[self.documents])
        runs = self._runs = sequence_runs(layout)
        # A run that begins inside a window cuts it.
        window: IntArray = np.searchsorted(firsts, runs.starts, side="right") - 1
        cuts = runs.starts[runs.starts < np.append(ends, 0)[window]]
        self.starts = np.unique(np.concatenate([firsts, cuts]))
        window = np.searchsorted(firsts, self.starts, side="right") - 1
        self.run: IntArray = np.searchsorted(runs.starts, self.starts, side="right") - 1
        self.firsts, self.numbers, self.documents = firsts[window], numbers[window], self.documents[window]
        self.ends = np.minimum(ends[window], (runs.starts + runs.lengths)[self.run])
        self.is_last = self.ends == ends[window]
        self.has_entry = self.is_last & (self.ends == self.firsts + rate)
        self.layout: Layout | None = None
        if count := len(self.starts):
            pieces = np.flatnonzero(np.diff(self.run, prepend=-1))
            owners = runs.ranks[self.run[pieces]]
            self.layout = PieceLayout(
                count, layout.ring_size, 1, (*pieces.tolist(), count), tuple(owners.tolist())
            )

    def pattern(self, apart: int) -> Pattern:
        """Return which fragments attend to which entries: those `apart` fragments or more before."""
        borders, count = np.flatnonzero(np.diff(self.documents, prepend=-1)), len(self.starts)
        if len(borders) == 1 and self.is_last.all():
            return Before(apart)
        queries = keys = Table(tuple(borders.tolist()), tuple(range(len(borders))), count)
        if not self.is_last.all():
            labels = np.where(self.is_last, self.documents, -1)
            changes = np.flatnonzero(np.diff(labels, prepend=labels[0] - 1))
            keys = Table(tuple(changes.tolist()), tuple(labels[changes].tolist()), count)
        return Entries(queries, keys, apart)

    def places(self, rank: int) -> Places:
        """Return the tokens of a rank by fragment and by slot."""
        windows, slots = self._own(rank), 1 if self.layout is None else self.layout.local_tokens
        position = self.firsts[windows] + np.arange(self.rate)[:, None]
        here = (position >= self.starts[windows]) & (position < self.ends[windows])
        tokens = np.zeros((self.rate, slots), dtype=np.int64)
        tokens[:, : len(windows)] = np.where(here, position + self._first_slot(windows), 0)
        places = np.full(self._tokens.local_tokens, -1, dtype=np.int64)
        places[tokens[:, : len(windows)][here]] = np.flatnonzero(
            np.pad(here, ((0, 0), (0, slots - len(windows))))
        )
        return Places(tokens.reshape(-1), np.maximum(places, 0), places < 0)

    def before(self, overlaps: bool) -> int:
        """Return how many tokens before its runs a rank needs for its entries, at most, on any rank.

        With `overlaps` an entry has a part of the window before its own.
        """
        first = self.firsts - self.rate * (overlaps & (self.numbers > 0))
        missing = (self._runs.starts[self.run] - first)[self.has_entry]
        return int(missing.max(initial=0))

    def sources(self, rank: int, overlaps: bool) -> Sources:
        """Return the windows of the entries of a rank; at least one, also where it has no entry.

        With `overlaps` each one follows the window before it in the same document. Where that is not an
        entry of this rank, or there is none, a window is put in front that gives no entry.
        """
        windows, before, runs = self._own(rank), self.before(overlaps), self._runs
        slots = 1 if self.layout is None else self.layout.local_tokens
        entries = windows[self.has_entry[windows]]
        first, number = self.firsts[entries], self.numbers[entries]
        is_fronted = overlaps & ((number == 0) | (np.diff(first, prepend=first[:1]) != self.rate))
        at = np.arange(len(entries)) + np.cumsum(is_fronted)
        fronts, count = at[is_fronted] - 1, max(len(entries) + int(is_fronted.sum()), 1)
        result = Sources(
            np.zeros((count, self.rate), dtype=np.int64), np.zeros(count, dtype=np.int64),
            np.zeros(count, dtype=bool), np.zeros(slots, dtype=np.int64),
        )  # fmt: skip
        halo_of = np.zeros(len(runs.starts), dtype=np.int64)  # by run
        halo_of[runs.list_rank_runs(rank)] = np.arange((runs.ranks == rank).sum())

        def tokens(fragments: IntArray, firsts: IntArray) -> IntArray:
            """Return the indices of windows that begin at some positions, for fragments of this rank."""
            position = firsts[:, None] + np.arange(self.rate)
            behind = position - runs.starts[self.run[fragments], None]  # where the run begins
            halo = halo_of[self.run[fragments], None]
            in_halo = self._tokens.local_tokens + (halo + 1) * before + behind
            return np.where(behind >= 0, position + self._first_slot(fragments)[:, None], in_halo)

        result.tokens[at], result.positions[at] = tokens(entries, first), number * self.rate
        begins = number[is_fronted] == 0
        front = first[is_fronted] - np.where(begins, 0, self.rate)
        result.tokens[fronts], result.hidden[fronts] = tokens(entries[is_fronted], front), begins
        result.windows[: len(windows)][self.has_entry[windows]] = at
        return result

    def _own(self, rank: int) -> IntArray:
        """Return a rank's fragments, in slot order."""
        return self.starts[:0] if self.layout is None else expand_runs(self.layout.runs(rank))

    def _first_slot(self, fragments: IntArray) -> IntArray:
        """Return what is added to a position in the run of a fragment for its slot."""
        runs: SequenceRuns = self._runs
        return runs.slots[self.run[fragments]] - runs.starts[self.run[fragments]]


def _find_whole_documents(tokens: int, rate: int, documents: Documents | None) -> tuple[IntArray, IntArray]:
    """Return the starts and lengths of the documents that have a complete window."""
    if documents is None:
        begins, ids = np.array([0]), np.array([0])
    else:
        if documents.tokens != tokens:
            raise RingPatternError.wrong("documents", f"{tokens} ids", documents.tokens, "use one length")
        begins, ids = np.array(documents.starts), np.array(documents.ids)
        real = ids[ids >= 0]
        if len(np.unique(real)) < len(real):
            raise RingPatternError.wrong(
                "documents", "consecutive tokens", "one with a gap", "give each run an id of its own"
            )
    lengths = np.diff(begins, append=tokens)
    whole = (ids >= 0) & (lengths >= rate)
    return begins[whole], lengths[whole]
