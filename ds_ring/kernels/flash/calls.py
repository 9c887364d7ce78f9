"""Turn tiles into calls of FlashAttention, each a rectangle with a window. Index arithmetic only.

[Note: windows]
FlashAttention aligns windows at the bottom right (since 2.1): with n queries and m keys, query i attends to
keys j with i + (m - n) - left <= j <= i + (m - n) + right; -1 leaves a side open. A tile's band low <= i - j
<= high is the window left = m - n + high, right = n - m - low. We never use a positive `right`: aten treats a
`right` of m or more as an open side, which is wrong if n > m. Such a tile is two windows: the queries up to
the first one that sees the last key, and the queries after it, whose right side is open. Of an open right
side FlashAttention 2 makes a `right` of m if the left one is not open: wrong again if n > m. Such a tile is
two windows, too: the queries that see all keys, and those after them, of which there are fewer than keys.

[Note: batches and variable lengths]
Sequences with the same window can be combined in two ways; we take the one with fewer calls. Equal sequences
at a regular distance become the batch of one call on a strided view (LongNet's segments). Others become the
sequences of one variable-length call (documents); gaps between them are sequences without keys or without
queries.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np

from ds_ring.comm.device_tables import DeviceTables
from ds_ring.kernels.interface import ALL_HEADS, Rows, Tile, each_tile
from ds_ring.masks.joins import split_by_head, trimmed
from ds_ring.masks.pattern import cache_by_pattern
from ds_ring.masks.slots import IntArray
from ds_ring.masks.tiles import Axis, Tiles

# [Note: fewer calls]
# Each call's result is merged into the accumulator, so calls cost more than their pairs. A shard has several
# runs, and so several tiles, where the positions of its slots jump. Neighbouring tiles are joined where one
# window covers exactly the pairs of both: whole rectangles with a side in common, and two triangles on one
# diagonal with the square below between them.

OPEN = -1  # of a window's side that hides nothing
PADDED_ROWS = 128  # FlashAttention rounds the rows of dQ of a sequence up to it


class FlashWindow(NamedTuple):
    """One sequence of a call: queries, keys and the sides of the window."""

    q: Rows
    k: Rows
    left: int
    right: int
    head_in_group: int
    bias: float

    @property
    def look(self) -> tuple[object, ...]:
        """Return the properties, other than sides, that joined windows must share."""
        return self.q.step, self.k.step, self.head_in_group, self.bias


def split_windows(tile: Tile) -> Iterator[FlashWindow]:
    """Yield a tile as one window or two; [Note: windows]."""
    assert tile.inside is None, "a tile that is no window"
    queries, keys = tile.q_rows.length, tile.k_rows.length
    lower, upper = tile.edges
    until = keys + tile.low  # queries from here on see the last key
    if lower and until < queries:
        first = max(until - tile.high, 0)  # key that they see
        yield from split_windows(tile.part(0, until, 0, keys))
        yield from split_windows(tile.part(until, queries - until, first, keys - first))
    elif upper and not lower and queries > keys + 1:
        whole = tile.high + 1
        yield from split_windows(tile.part(0, whole, 0, keys))
        yield from split_windows(tile.part(whole, queries - whole, 0, keys))
    else:
        left, right = keys - queries + tile.high if upper else OPEN, 0 if lower else OPEN
        yield FlashWindow(tile.q_rows, tile.k_rows, left, right, tile.head_in_group, tile.bias)


def find_end(rows: Rows) -> int:
    """Return the slot of the row after the last one."""
    return rows.start + rows.length * rows.step


def _join_rows(first: Rows, second: Rows) -> Rows:
    return first._replace(length=first.length + second.length)


def join_windows(windows: list[FlashWindow]) -> list[FlashWindow]:
    """Return fewer windows with the same pairs; [Note: fewer calls]."""
    full: list[FlashWindow] = []
    triangles: list[FlashWindow] = []
    others: list[FlashWindow] = []
    for window in windows:
        if window.left != OPEN:
            others.append(window)
        elif window.right == OPEN:
            full.append(window)
        else:  # a triangle is square and causal
            causal = window.right == 0 and window.q.length == window.k.length
            (triangles if causal else others).append(window)
    for along_keys in (False, True):
        triangles, full = _join_diagonals(triangles, _join_rectangles(full, along_keys))
    return full + triangles + others


def _join_rectangles(full: list[FlashWindow], along_keys: bool) -> list[FlashWindow]:
    """Join whole rectangles with the same keys (or queries) and neighbouring queries (or keys)."""
    alike: dict[tuple[object, ...], list[FlashWindow]] = defaultdict(list)
    for window in full:
        alike[(*window.look, window.q if along_keys else window.k)].append(window)
    calls = []
    for group in alike.values():
        group.sort(key=lambda window: (window.k if along_keys else window.q).start)
        last = group[0]
        for window in group[1:]:
            if along_keys and find_end(last.k) == window.k.start:
                last = last._replace(k=_join_rows(last.k, window.k))
            elif not along_keys and find_end(last.q) == window.q.start:
                last = last._replace(q=_join_rows(last.q, window.q))
            else:
                calls.append(last)
                last = window
        calls.append(last)
    return calls


def _join_diagonals(
    triangles: list[FlashWindow], full: list[FlashWindow]
) -> tuple[list[FlashWindow], list[FlashWindow]]:
    """Join two triangles on one diagonal and the whole rectangle below between them."""
    squares: dict[tuple[object, ...], list[FlashWindow]] = defaultdict(list)
    for window in full:
        squares[(*window.look, window.q, window.k)].append(window)
    done: list[FlashWindow] = []
    for window in sorted(triangles, key=lambda window: (window.q.start, window.k.start)):
        while done and (find_end(done[-1].q), find_end(done[-1].k)) == (window.q.start, window.k.start):
            between = squares.get((*window.look, window.q, done[-1].k))
            if not between or done[-1].look != window.look:
                break
            between.pop()
            before = done.pop()
            window = window._replace(q=_join_rows(before.q, window.q), k=_join_rows(before.k, window.k))
        done.append(window)
    return done, [window for left in squares.values() for window in left]


# Tiles with a multiplicity that varies, as a sum of tiles without: what a kernel without a bias can compute.
#
# [Note: branch by branch]
# The merge of partial results adds duplicates up exactly as log m does: attention over a sum of branches is
# the merge of the branches' attentions, by their log-sum-exps (Ding et al. 2023, LongNet, equation 10; exact,
# and with the global out and lse so are the gradients). So LongNet needs no bias: a branch of segments w and
# rate r is causal attention on every r-th slot, segment by segment. A pair of several branches is computed
# several times: 1.33 times the pairs at growth 2, 1.06 at growth 4.
#
# Two ways to the same sum. A weighted tile is the sum of its classes, each the tile restricted to every r-th
# query and key: always right, since it needs nothing but the table; but the tiles of a branch are cut where
# other branches' segments end. If the table knows its rule, the branches are cut anew from the runs that the
# table covers: few large tiles. The second way is taken where both count as many pairs.

MANY_RUNS = 256  # of one side, from which on branches are not cut anew


def get_branch_form(tiles: Tiles) -> Tiles:
    """Return tiles with the same sum of pairs in which no weight varies; [Note: branch by branch].

    Tables without weights and with m = 1 throughout are returned as they are.
    """
    if not len(tiles) or ((tiles.weight < 0).all() and (tiles.multiplicity == 1).all()):
        return tiles
    anew, by_class = _cut_anew(tiles), _split_classes(tiles)
    if anew is not None:
        counted = (int((tiles.pairs * tiles.multiplicity).sum()) for tiles in (anew, by_class))
        if len(anew) <= len(by_class) and len(set(counted)) == 1:
            return anew
    return by_class


def _split_classes(tiles: Tiles) -> Tiles:
    """Return weighted tiles as the sum of their classes, the others as they are."""
    parts = [tiles.rows(tiles.weight < 0)]
    for number, weights in enumerate(tiles.weights):
        weighted = tiles.rows(tiles.weight == number)
        if not len(weighted):
            continue
        bare = replace(weighted, weight=np.full(len(weighted), -1, dtype=np.int64))
        for residue, modulus in weights.classes:
            q, k = bare.q.residue(residue, modulus), bare.k.residue(residue, modulus)
            parts.append(trimmed(bare.sides(q, k)))
    return Tiles.concat(parts)


def _cut_anew(tiles: Tiles) -> Tiles | None:
    """Return the tiles of the table's rule, branch by branch, on the slots that the table covers."""
    if tiles.rule is None or tiles.masks:
        return None
    q, k = _find_runs(tiles.q), _find_runs(tiles.k)
    if max(len(q.slot), len(k.slot)) > MANY_RUNS:
        return None
    i, j = np.repeat(np.arange(len(q.slot)), len(k.slot)), np.tile(np.arange(len(k.slot)), len(q.slot))
    rectangles = replace(Tiles.whole(q.rows(i), k.rows(j)), rule=tiles.rule)
    return split_by_head(tiles.rule.branches_by_head, rectangles, plain=True)


def _find_runs(axis: Axis) -> Axis:
    """Return the slots that some row covers as few runs; the first ones if they are too many."""
    columns = (axis.slot, axis.slot_step, axis.position, axis.position_step, axis.length)
    rows = np.unique(np.stack(columns, axis=1), axis=0)
    slot, slot_step, position, step, length = rows.T
    merged = _merge_rows(rows)
    if merged is not None:
        return merged
    size = int((slot + slot_step * (length - 1)).max()) + 1
    where: IntArray = np.full(size, -1, dtype=np.int64)
    row = np.repeat(np.arange(len(rows)), length)
    within = np.arange(len(row)) - np.repeat(np.cumsum(length) - length, length)
    where[slot[row] + slot_step[row] * within] = position[row] + step[row] * within
    slots = np.flatnonzero(where >= 0)
    places = where[slots]
    apart = np.stack([np.diff(slots), np.diff(places)], axis=1)
    # a run ends at the point whose step differs from the one before it
    turns = np.append(np.flatnonzero((apart[1:] != apart[:-1]).any(axis=1)) + 1, len(slots) - 1)
    runs: list[tuple[int, int]] = []
    first = 0
    while first < len(slots) and len(runs) <= MANY_RUNS:
        alone = first == len(slots) - 1 or apart[first].min() <= 0
        last = first if alone else int(turns[np.searchsorted(turns, first, side="right")])
        runs.append((first, last))
        first = last + 1
    starts, ends = np.array(runs).T
    next_one = np.minimum(starts + 1, len(slots) - 1)
    steps = [np.where(ends > starts, x[next_one] - x[starts], 1) for x in (slots, places)]
    return Axis(slots[starts], steps[0], places[starts], steps[1], ends - starts + 1)


def _merge_rows(rows: IntArray) -> Axis | None:
    """Return the runs of the densest rows if all other rows are inside them, else None.

    Args:
        rows: int64 [n, 5] of (slot, slot step, position, position step, length), as of an `Axis`.
    """
    several = rows[:, 4] > 1
    if not several.any():
        return None
    dense = int(rows[several, 1].min())
    base, others = rows[several & (rows[:, 1] == dense)], rows[~(several & (rows[:, 1] == dense))]
    base = base[np.argsort(base[:, 0], kind="stable")]
    runs: list[list[int]] = []  # slot, position, position step, length
    for slot, _, position, step, length in base.tolist():
        ahead = (slot - runs[-1][0]) // dense if runs else 0  # tokens from the run's first one on
        touches = bool(runs) and slot == runs[-1][0] + ahead * dense and ahead <= runs[-1][3]
        if touches and step == runs[-1][2] and position == runs[-1][1] + ahead * step:
            runs[-1][3] = max(runs[-1][3], ahead + length)
        elif touches and ahead < runs[-1][3]:
            return None
        else:
            runs.append([slot, position, step, length])
    slot, position, step, length = np.array(runs).T
    if (slot[1:] <= (slot + (length - 1) * dense)[:-1]).any():
        return None
    run = np.searchsorted(slot, others[:, 0], side="right") - 1
    ahead = others[:, 0] - slot[run]
    last = ahead + (others[:, 4] - 1) * others[:, 1]
    inside = (run >= 0) & (ahead % dense == 0) & (last <= (length[run] - 1) * dense)
    inside &= others[:, 2] == position[run] + ahead // dense * step[run]
    inside &= (others[:, 4] == 1) | (others[:, 3] * dense == others[:, 1] * step[run])
    if not inside.all() or len(runs) > MANY_RUNS:
        return None
    return Axis(slot, np.full_like(slot, dense), position, step, length)


MAX_SEQUENCES = 1 << 15  # of one call: CUDA has a grid of at most 65,535 of them; `split_call` makes fewer
GAP = 256  # a larger gap (slots, beyond the lengths of both sequences) costs more than another call


@dataclass(frozen=True)
class FlashCall:
    """One call: queries, keys and a window; [Note: windows]. Its properties are computed once.

    Attributes:
        q_rows, k_rows: query and key slots; `repeats` of both are the batch.
        left, right: sides of the window, in keys; OPEN masks nothing.
        head_in_group: the query head within the group of a K/V head; -1 for all.
        bias: added to every score: log m, where m is how often each pair counts.
        q_ends, k_ends: for a variable-length call, 0 and the end of each sequence, counted from the first
            row; empty if each repetition is one sequence.
    """

    q_rows: Rows
    k_rows: Rows
    left: int = OPEN
    right: int = OPEN
    head_in_group: int = -1
    bias: float = 0.0
    q_ends: tuple[int, ...] = ()
    k_ends: tuple[int, ...] = ()

    def heads(self, group: int) -> slice:
        """Return the slice of query heads, if `group` of them share a K/V head."""
        return ALL_HEADS if self.head_in_group < 0 else slice(self.head_in_group, None, group)

    @cached_property
    def is_causal(self) -> bool:
        """Return whether the window is the one of `is_causal`."""
        return self.left == OPEN and self.right == 0

    @property
    def kind(self) -> tuple[object, ...]:
        """Return what a kernel may be compiled for: the open sides, all heads or some, variable lengths."""
        return (
            self.left == OPEN,
            self.right == OPEN,
            self.is_causal,
            self.head_in_group < 0,
            bool(self.q_ends),
        )

    @property
    def lengths(self) -> list[tuple[int, int]]:
        """Return (queries, keys) of each sequence of one repetition."""
        if not self.q_ends:
            return [(self.q_rows.length, self.k_rows.length)]
        ends = (itertools.pairwise(self.q_ends), itertools.pairwise(self.k_ends))
        return [(i1 - i0, j1 - j0) for (i0, i1), (j0, j1) in zip(*ends, strict=True)]

    @cached_property
    def is_plain(self) -> bool:
        """Return whether the call is one sequence per sample: no batch of sequences, no variable lengths."""
        return not self.q_ends and self.q_rows.repeats == 1

    @cached_property
    def tables(self) -> DeviceTables:
        """Return the cache of the call's tables on devices."""
        return DeviceTables()

    @cached_property
    def has_empty_rows(self) -> bool:
        """Return whether some query of the call has no key."""
        return any(queries and not keys for queries, keys in self.lengths) if self.q_ends else False

    @property
    def dq_rows(self) -> int:
        """Return the rows of float32 dQ that FlashAttention allocates for a head of one repetition."""
        if self.q_ends:
            return self.q_rows.length + PADDED_ROWS * len(self.lengths)
        return -(-self.q_rows.length // PADDED_ROWS) * PADDED_ROWS

    @property
    def pairs(self) -> int:
        """Return the number of attended (query, key) pairs, repetitions included."""
        counts = (_count_pairs(n, m, self.left, self.right) for n, m in self.lengths)
        return self.q_rows.repeats * sum(counts)


@partial(cache_by_pattern, 512)
def make_flash_calls(tiles: Tiles) -> tuple[FlashCall, ...]:
    """Return the calls for a table of tiles; cached for each table object.

    A pair with multiplicity m is either in m calls, or in one call whose bias is log m. A tile with a mask
    function is not a window; the caller must refuse it.
    """
    windows = [window for tile in each_tile(get_branch_form(tiles)) for window in split_windows(tile)]
    return tuple(_combine_windows(join_windows(windows)))


def _count_pairs(queries: int, keys: int, left: int, right: int) -> int:
    if left == OPEN and right == OPEN:
        return queries * keys
    i, shift = np.arange(queries), keys - queries
    first = np.zeros_like(i) if left == OPEN else np.maximum(i + shift - left, 0)
    last = np.minimum(keys - 1, keys - 1 if right == OPEN else i + shift + right)
    return int(np.maximum(last - first + 1, 0).sum())


def _combine_windows(windows: list[FlashWindow]) -> Iterator[FlashCall]:
    """Combine windows with equal sides into few calls: batches or variable-length sequences."""
    alike: dict[tuple[object, ...], list[FlashWindow]] = defaultdict(list)
    for window in windows:
        alike[(*window.look, window.left, window.right)].append(window)
    for group in alike.values():
        group.sort(key=lambda window: (window.q.start, window.k.start))
        batches = list(_combine_batches(group))
        chains = list(_combine_chains(group)) if len(batches) > 1 else batches
        yield from batches if len(batches) <= len(chains) else chains


def _combine_batches(windows: Iterable[FlashWindow]) -> Iterator[FlashCall]:
    """Combine equal windows at a regular distance into one call each."""
    equal: dict[tuple[int, int], list[FlashWindow]] = defaultdict(list)
    for window in windows:
        equal[window.q.length, window.k.length].append(window)
    for group in equal.values():
        index = 0
        while index < len(group):
            head, count = group[index], 1
            q_apart = k_apart = 0
            if index + 1 < len(group):
                q_apart = group[index + 1].q.start - head.q.start
                k_apart = group[index + 1].k.start - head.k.start
            while (
                index + count < len(group)
                and count < MAX_SEQUENCES
                and group[index + count].q.start == head.q.start + count * q_apart
                and group[index + count].k.start == head.k.start + count * k_apart
                and _apart(head.q, count + 1, q_apart)
                and _apart(head.k, count + 1, k_apart)
            ):
                count += 1
            if count > 1:
                q, k = (
                    rows._replace(repeats=count, stride=apart)
                    for rows, apart in ((head.q, q_apart), (head.k, k_apart))
                )
                yield FlashCall(q, k, *head[2:])
            else:
                yield FlashCall(*head)
            index += count


def _apart(rows: Rows, repeats: int, stride: int) -> bool:
    """Return whether no slot is in two repetitions: they follow one another, or are interleaved."""
    span = rows.step * (rows.length - 1) + 1
    return stride >= span or (stride > 0 and stride * (repeats - 1) < rows.step)


def _combine_chains(windows: list[FlashWindow]) -> Iterator[FlashCall]:
    """Combine windows, in the order of their queries, into variable-length calls."""
    chain: list[FlashWindow] = []
    for window in windows:
        if chain and not _follows(chain[-1], window, len(chain)):
            yield _make_variable_call(chain)
            chain = []
        chain.append(window)
    if chain:
        yield _make_variable_call(chain)


def _follows(last: FlashWindow, window: FlashWindow, count: int) -> bool:
    sides = ((last.q, window.q), (last.k, window.k))
    return 2 * count + 2 < MAX_SEQUENCES and all(
        0 <= after.start - find_end(before) <= (before.length + after.length + GAP) * after.step
        and (after.start - before.start) % after.step == 0
        for before, after in sides
    )


def _make_variable_call(chain: list[FlashWindow]) -> FlashCall:
    """Return one call for windows that follow one another on both sides."""
    first, last = chain[0], chain[-1]
    if len(chain) == 1:
        return FlashCall(*first)
    q_ends, k_ends = [0], [0]
    for window in chain:
        # The gap before the window becomes a sequence of queries without keys, or of keys without queries.
        gaps = [(r.start - o.start) // r.step for r, o in ((window.q, first.q), (window.k, first.k))]
        if gaps[0] > q_ends[-1]:
            q_ends.append(gaps[0])
            k_ends.append(k_ends[-1])
        if gaps[1] > k_ends[-1]:
            q_ends.append(q_ends[-1])
            k_ends.append(gaps[1])
        q_ends.append(gaps[0] + window.q.length)
        k_ends.append(gaps[1] + window.k.length)
    q, k = (
        begin._replace(length=(find_end(end) - begin.start) // begin.step)
        for begin, end in ((first.q, last.q), (first.k, last.k))
    )
    return FlashCall(q, k, *first[2:], tuple(q_ends), tuple(k_ends))


def split_call(call: FlashCall, fits: Callable[[FlashCall], bool]) -> Iterator[FlashCall]:
    """Yield the call, or calls of parts of its queries that together are it and that fit."""
    if fits(call):
        yield call
        return
    assert call.q_ends or call.q_rows.length > PADDED_ROWS, "a block of queries has too many elements"
    for half in _halve_sequences(call) if call.q_ends else _halve_queries(call):
        yield from split_call(half, fits)


def _halve_sequences(call: FlashCall) -> Iterator[FlashCall]:
    """Yield two calls of half as many sequences; one with a single sequence has no variable lengths."""
    count = len(call.q_ends) - 1
    for first, last in ((0, count // 2), (count // 2, count)):
        sides = []
        for rows, ends in ((call.q_rows, call.q_ends), (call.k_rows, call.k_ends)):
            begin, *rest = (end - ends[first] for end in ends[first : last + 1])
            sides.append((rows.part(ends[first], rest[-1]), (begin, *rest)))
        (q_rows, q_ends), (k_rows, k_ends) = sides
        if q_rows.length and k_rows.length:
            lengths = ((), ()) if last - first == 1 else (q_ends, k_ends)
            yield replace(call, q_rows=q_rows, k_rows=k_rows, q_ends=lengths[0], k_ends=lengths[1])


def _halve_queries(call: FlashCall) -> Iterator[FlashCall]:
    """Yield the calls of the first and of the last queries, each with the keys that its window reaches."""
    queries, keys = call.q_rows.length, call.k_rows.length
    middle = -(-queries // (2 * PADDED_ROWS)) * PADDED_ROWS
    for first, end in ((0, middle), (middle, queries)):
        begin = 0 if call.left == OPEN else max(first + keys - queries - call.left, 0)
        stop = keys if call.right == OPEN else min(end + keys - queries + call.right, keys)
        # The window is counted from the last query and the last key: the last key may be another one.
        left = OPEN if call.left == OPEN else call.left + (stop - end) - (keys - queries)
        right = OPEN if call.right == OPEN else call.right + (keys - queries) - (stop - end)
        rows = call.q_rows.part(first, end - first), call.k_rows.part(begin, stop - begin)
        yield replace(call, q_rows=rows[0], k_rows=rows[1], left=left, right=right)
