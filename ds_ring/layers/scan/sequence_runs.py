"""The runs of all ranks in the order of positions: what a halo copies, and the rounds of a scan.

A recurrence or a convolution passes from run to run, so it needs to know which run of which rank comes next.
Owns this order and the messages that follow from it; pure data. Each run must be consecutive positions
(step 1): the zigzag, contiguous and balanced layouts have such runs, the striped and residue layouts do not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ds_ring.errors import RingLayoutError
from ds_ring.masks.slots import IntArray
from ds_ring.patterns.documents.pattern import Documents, Tree
from ds_ring.schedule.layout import Layout


class HaloMessages(NamedTuple):
    """The tokens that a rank copies, sends and receives for its halo, by the other rank.

    Attributes:
        local: (slots, places) of the tokens that the rank has itself, int64 [n] each. A place is an index in
            the halos of the rank's runs, [runs * (before + after)].
        sends: slots of the tokens that each reader gets.
        receives: places of the tokens that each owner sends.
    """

    local: tuple[IntArray, IntArray]
    sends: dict[int, IntArray]
    receives: dict[int, IntArray]


class ScanStep(NamedTuple):
    """One message of a round: the run `to` gets what the run `of` has. Runs are numbered by position."""

    of: int
    to: int
    is_complete: bool  # `of` has the state from where its sequence begins: its transition is not needed


@dataclass(frozen=True, eq=False)
class SequenceRuns:
    """All runs of a sequence in the order of positions; [N] int64 each.

    Attributes:
        starts, lengths: positions.
        ranks: the rank of the sequence (ring rank * parts + part) that has the run.
        slots: first local slot of the run on that rank.
        previous: the run that each one continues: the one before it, or in a tree the last one of the node
            above, of which several runs may be the next; -1 for none.
        local_tokens: slots of every rank.
        tokens: length T of the sequence.
    """

    starts: IntArray
    lengths: IntArray
    ranks: IntArray
    slots: IntArray
    previous: IntArray
    local_tokens: int
    tokens: int

    def list_rank_runs(self, rank: int) -> IntArray:
        """Return the numbers of a rank's runs, in slot order."""
        mine = np.flatnonzero(self.ranks == rank)
        return mine[np.argsort(self.slots[mine])]

    def rounds(self) -> list[list[ScanStep]]:
        """Return the messages of an inclusive scan over all runs, round by round.

        Hillis and Steele (1986), "Data parallel algorithms": in round i a run gets what the run 2^i before it
        has, so ceil(log2) of the longest path rounds suffice. Their list ranking by pointers does the same on
        the paths of a tree.
        """
        above, rounds = self.previous.copy(), []
        while len(to := np.flatnonzero(above >= 0)):
            of = above[to]
            steps = zip(of.tolist(), to.tolist(), (above[of] < 0).tolist(), strict=True)
            rounds.append([ScanStep(*step) for step in steps])
            above[to] = above[of]
        return rounds

    def shift(self) -> list[ScanStep]:
        """Return the messages by which each run gets what the run before it has."""
        to = np.flatnonzero(self.previous >= 0)
        return [
            ScanStep(of, run, True) for of, run in zip(self.previous[to].tolist(), to.tolist(), strict=True)
        ]


@lru_cache(maxsize=64)
def sequence_runs(layout: Layout, parts: int = 1, tree: Tree | None = None) -> SequenceRuns:
    """Return the runs of a layout whose shards are cut into equal parts (for Ulysses).

    With a tree they are cut where its nodes begin.

    Raises:
        RingLayoutError: a run has gaps.
        RingShapeError: shards cannot be cut into that many parts.
    """
    rows, part_slots = [], layout.part_slots(parts)
    for ring_rank in range(layout.ring_size):
        first = 0  # slot of the shard
        for start, step, length in layout.runs(ring_rank).tolist():
            if step != 1 and length > 1:
                raise RingLayoutError(
                    f"{layout}: expected shards of consecutive positions, got every {step}th token on ring"
                    f' rank {ring_rank}; use the layout "zigzag", "contiguous" or "balanced"'
                )
            done = 0
            while done < length:
                part, slot = divmod(first + done, part_slots)
                count = min(length - done, part_slots - slot)
                rows.append((start + done, count, ring_rank * parts + part, slot))
                done += count
            first += length
    table = np.array(sorted(rows), dtype=np.int64).reshape(-1, 4)
    starts, lengths, ranks, slots = np.ascontiguousarray(table.T)
    if tree is None:
        return SequenceRuns(
            starts, lengths, ranks, slots, np.arange(len(starts)) - 1, part_slots, layout.tokens
        )
    cut = np.unique(np.concatenate([starts, tree.starts[tree.starts < layout.tokens]]))
    row: IntArray = np.searchsorted(starts, cut, side="right") - 1
    previous: IntArray = np.arange(len(cut)) - 1
    # The last run of a node is before the first one of the next node. Padding is a node of its own.
    of_node: IntArray = np.searchsorted(cut, tree.starts)
    parents = np.array(tree.parents)
    previous[of_node[:-1]] = np.where(parents >= 0, of_node[parents + 1] - 1, -1)
    previous[of_node[-1] :][:1] = -1
    return SequenceRuns(
        cut, np.diff(cut, append=layout.tokens), ranks[row], slots[row] + cut - starts[row], previous,
        part_slots, layout.tokens,
    )  # fmt: skip


@lru_cache(maxsize=256)
def halo_messages(
    layout: Layout, parts: int, rank: int, before: int, after: int, tree: Tree | None = None
) -> HaloMessages:
    """Return what a rank of the sequence copies, sends and receives for its halos.

    The halo of a run is the `before` tokens before it, in a tree those of its path, and the `after` tokens
    after it; a halo may cover several short runs. Places outside the sequence stay empty.
    """
    runs, width = sequence_runs(layout, parts, tree), before + after
    local: tuple[list[IntArray], list[IntArray]] = ([], [])
    sends: dict[int, list[IntArray]] = defaultdict(list)
    receives: dict[int, list[IntArray]] = defaultdict(list)
    number_of = {int(run): number for number, run in enumerate(runs.list_rank_runs(rank))}
    ranks = runs.ranks.tolist()
    for reader, reading in enumerate(ranks):
        for run, first, count, place in _beside(runs, reader, before, after):
            owner, slots = ranks[run], runs.slots[run] + first + np.arange(count)
            if reading == rank:
                places = number_of[reader] * width + place + np.arange(count)
                if owner == rank:
                    local[0].append(slots)
                    local[1].append(places)
                else:
                    receives[owner].append(places)
            elif owner == rank:
                sends[reading].append(slots)
    joined = tuple(np.concatenate([np.empty(0, dtype=np.int64), *part]) for part in local)
    return HaloMessages(
        (joined[0], joined[1]),
        {reader: np.concatenate(parts_) for reader, parts_ in sorted(sends.items())},
        {owner: np.concatenate(parts_) for owner, parts_ in sorted(receives.items())},
    )


def _beside(runs: SequenceRuns, reader: int, before: int, after: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield the tokens of a run's halo: their run, the first one in it, their number and the first place."""
    run, left = int(runs.previous[reader]), before
    while left and run >= 0:
        length = int(runs.lengths[run])
        count = min(length, left)
        left -= count
        yield run, length - count, count, left
        run = int(runs.previous[run])
    run, done = reader + 1, 0
    while done < after and run < len(runs.starts):
        count = min(int(runs.lengths[run]), after - done)
        yield run, 0, count, before + done
        run, done = run + 1, done + count


@lru_cache(maxsize=256)
def other_documents(
    layout: Layout, parts: int, rank: int, before: int, after: int, documents: Documents
) -> IntArray:
    """Return the places in a rank's halos whose token is in another document than the border of its run."""
    runs, starts, outside = (
        sequence_runs(layout, parts),
        np.array(documents.starts),
        [np.empty(0, dtype=bool)],
    )
    for run in runs.list_rank_runs(rank).tolist():
        first, end = int(runs.starts[run]), int(runs.starts[run] + runs.lengths[run])
        places = np.concatenate([np.arange(first - before, first), np.arange(end, end + after)])
        borders = np.repeat([first, end - 1], [before, after])
        of_places, of_borders = (np.searchsorted(starts, where, side="right") for where in (places, borders))
        outside.append(of_places != of_borders)
    return np.flatnonzero(np.concatenate(outside))


class Piece(NamedTuple):
    """Consecutive slots of a rank in one run and one document.

    Attributes:
        slot, length: first slot, and number of slots.
        run: number of its run among the rank's runs.
        is_first, is_last: the piece begins, or ends, where the run does.
        continues: the piece is the first, and its document, or its path in a tree, has tokens before it.
    """

    slot: int
    length: int
    run: int
    is_first: bool
    is_last: bool
    continues: bool


@lru_cache(maxsize=256)
def pieces(layout: Layout, parts: int, rank: int, documents: Documents | Tree | None) -> tuple[Piece, ...]:
    """Return the pieces of a rank of the sequence, in slot order; without documents these are its runs."""
    if isinstance(documents, Tree):
        runs = sequence_runs(layout, parts, documents)
        return tuple(
            Piece(
                int(runs.slots[run]),
                int(runs.lengths[run]),
                number,
                True,
                True,
                bool(runs.previous[run] >= 0),
            )
            for number, run in enumerate(runs.list_rank_runs(rank).tolist())
        )
    runs = sequence_runs(layout, parts)
    breaks = np.array([0] if documents is None else documents.starts, dtype=np.int64)
    result = []
    for number, run in enumerate(runs.list_rank_runs(rank).tolist()):
        start, end = int(runs.starts[run]), int(runs.starts[run] + runs.lengths[run])
        inside = breaks[(breaks > start) & (breaks < end)].tolist()
        edges = [start, *inside, end]
        begins_document = bool(np.isin(start, breaks))
        for first, last in pairwise(edges):
            result.append(
                Piece(
                    int(runs.slots[run]) + first - start,
                    last - first,
                    number,
                    first == start,
                    last == end,
                    first == start and not begins_document,
                )
            )
    return tuple(result)
