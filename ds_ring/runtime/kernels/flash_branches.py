"""Tiles with a multiplicity that varies, as a sum of tiles without: what a kernel without a bias can compute.

[Note: branch by branch]
The merge of partial results adds duplicates up exactly as log m does: attention over a sum of branches is the
merge of the branches' attentions, by their log-sum-exps (Ding et al. 2023, LongNet, equation 10; exact, and
with the global out and lse so are the gradients). So LongNet needs no bias: a branch of segments w and rate r
is causal attention on every r-th slot, segment by segment. A pair of several branches is computed several
times: 1.33 times the pairs at growth 2, 1.06 at growth 4.

Two ways to the same sum. A weighted tile is the sum of its classes, each the tile restricted to every r-th
query and key: always right, since it needs nothing but the table; but the tiles of a branch are cut where
other branches' segments end. If the table knows its rule, the branches are cut anew from the runs that the
table covers: few large tiles. The second way is taken where both count as many pairs.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ds_ring.masks.joins import tiles_by_head
from ds_ring.masks.slot_ranges import IntArray
from ds_ring.masks.tiles import Axis, Kind, Tiles
from ds_ring.masks.triangulation import cut_by_distance, distances_of_kind

MANY_RUNS = 256  # of one side, from which on branches are not cut anew


def branch_form(tiles: Tiles) -> Tiles:
    """Return tiles with the same sum of pairs in which no weight varies; [Note: branch by branch].

    Tables without weights and with m = 1 throughout are returned as they are.
    """
    if not len(tiles) or ((tiles.weight < 0).all() and (tiles.multiplicity == 1).all()):
        return tiles
    anew = _cut_anew(tiles)
    if anew is not None:
        parts, pairs = _of_classes(tiles)
        # by class there are at least so many tiles, each of which may be cut further
        if len(anew) <= parts and int((anew.pairs * anew.multiplicity).sum()) == pairs:
            return anew
    return _by_class(tiles)


def _of_classes(tiles: Tiles) -> tuple[int, int]:
    """Count what `_by_class` would return: parts that are not empty, and pairs with their m."""
    plain = tiles.weight < 0
    parts, pairs = int(plain.sum()), int((tiles.pairs * tiles.multiplicity)[plain].sum())
    for number, weights in enumerate(tiles.weights):
        weighted = tiles.rows(tiles.weight == number)
        if not len(weighted):
            continue
        least, most = distances_of_kind(weighted)
        for residue, modulus in weights.classes:
            q, k = weighted.q.residue(residue, modulus), weighted.k.residue(residue, modulus)
            # positions of both sides have one step: query i and key j are apart + (i - j) * step
            step, apart = q.position_step, q.position - k.position
            above = np.maximum(-((apart - least) // step), -k.length)
            below = np.minimum((most - apart) // step, q.length)
            counts = _pairs_up_to(q.length, k.length, below) - _pairs_up_to(q.length, k.length, above - 1)
            counts = np.where(above <= below, counts, 0)
            parts, pairs = (
                parts + int((counts > 0).sum()),
                pairs + int((counts * weighted.multiplicity).sum()),
            )
    return parts, pairs


def _pairs_up_to(queries: IntArray, keys: IntArray, most: IntArray) -> IntArray:
    """Count pairs of 0 <= i < queries and 0 <= j < keys with i - j <= most."""
    # row i has keys - max(i - most, 0) of them, if that is positive
    whole = np.clip(most + 1, 0, queries)
    last = np.clip(most + keys, whole, queries)
    rows = last - whole
    first = keys - (whole - most)
    return whole * keys + rows * first - rows * (rows - 1) // 2


def _by_class(tiles: Tiles) -> Tiles:
    """Return weighted tiles as the sum of their classes, the others as they are."""
    parts = [tiles.rows(tiles.weight < 0)]
    for number, weights in enumerate(tiles.weights):
        weighted = tiles.rows(tiles.weight == number)
        if not len(weighted):
            continue
        least, most = distances_of_kind(weighted)
        bare = replace(weighted, weight=np.full(len(weighted), -1, dtype=np.int64))
        for residue, modulus in weights.classes:
            q, k = bare.q.residue(residue, modulus), bare.k.residue(residue, modulus)
            kept = (q.length > 0) & (k.length > 0)
            # a triangle of every r-th token is cut at the same distances
            rectangles = bare.of_kind(Kind.FULL).sides(q, k)
            parts.append(cut_by_distance(rectangles, least[kept], most[kept]))
    return Tiles.concat(parts)


def _cut_anew(tiles: Tiles) -> Tiles | None:
    """Return the tiles of the table's rule, branch by branch, on the slots that the table covers."""
    if tiles.rule is None or tiles.masks:
        return None
    q, k = _runs(tiles.q), _runs(tiles.k)
    if max(len(q.slot), len(k.slot)) > MANY_RUNS:
        return None
    i, j = np.repeat(np.arange(len(q.slot)), len(k.slot)), np.tile(np.arange(len(k.slot)), len(q.slot))
    zeros = np.zeros(len(i), dtype=np.int64)
    rectangles = Tiles(q.rows(i), k.rows(j), zeros, zeros - 1, zeros + 1, zeros - 1, zeros - 1)
    return tiles_by_head(tiles.rule.branches_by_head, replace(rectangles, rule=tiles.rule), plain=True)


def _runs(axis: Axis) -> Axis:
    """Return the slots that some row covers as few runs; the first ones if they are too many."""
    columns = (axis.slot, axis.slot_step, axis.position, axis.position_step, axis.length)
    rows = np.unique(np.stack(columns, axis=1), axis=0)
    slot, slot_step, position, step, length = rows.T
    merged = _merged(rows)
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
    found: list[tuple[int, int]] = []
    first = 0
    while first < len(slots) and len(found) <= MANY_RUNS:
        alone = first == len(slots) - 1 or apart[first].min() <= 0
        last = first if alone else int(turns[np.searchsorted(turns, first, side="right")])
        found.append((first, last))
        first = last + 1
    starts, ends = np.array(found).T
    next_one = np.minimum(starts + 1, len(slots) - 1)
    steps = [np.where(ends > starts, x[next_one] - x[starts], 1) for x in (slots, places)]
    return Axis(slots[starts], steps[0], places[starts], steps[1], ends - starts + 1)


def _merged(rows: IntArray) -> Axis | None:
    """Return the runs that the densest rows make up, if all other rows lie inside; None if they do not.

    Args:
        rows: int64 [n, 5] of (slot, slot step, position, position step, length), as of an `Axis`.
    """
    several = rows[:, 4] > 1
    if not several.any():
        return None
    dense = int(rows[several, 1].min())
    base, others = rows[several & (rows[:, 1] == dense)], rows[~(several & (rows[:, 1] == dense))]
    base = base[np.argsort(base[:, 0], kind="stable")]
    found: list[list[int]] = []  # slot, position, position step, length
    for slot, _, position, step, length in base.tolist():
        ahead = (slot - found[-1][0]) // dense if found else 0  # tokens from the run's first one on
        touches = bool(found) and slot == found[-1][0] + ahead * dense and ahead <= found[-1][3]
        if touches and step == found[-1][2] and position == found[-1][1] + ahead * step:
            found[-1][3] = max(found[-1][3], ahead + length)
        elif touches and ahead < found[-1][3]:
            return None
        else:
            found.append([slot, position, step, length])
    slot, position, step, length = np.array(found).T
    if (slot[1:] <= (slot + (length - 1) * dense)[:-1]).any():
        return None
    run = np.searchsorted(slot, others[:, 0], side="right") - 1
    ahead = others[:, 0] - slot[run]
    last = ahead + (others[:, 4] - 1) * others[:, 1]
    inside = (run >= 0) & (ahead % dense == 0) & (last <= (length[run] - 1) * dense)
    inside &= others[:, 2] == position[run] + ahead // dense * step[run]
    inside &= (others[:, 4] == 1) | (others[:, 3] * dense == others[:, 1] * step[run])
    if not inside.all() or len(found) > MANY_RUNS:
        return None
    return Axis(slot, np.full_like(slot, dense), position, step, length)
