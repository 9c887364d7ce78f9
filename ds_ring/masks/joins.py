"""Tiles of branches: the one function that makes the tiles of all patterns. Owns no pattern.

[Note: joins]
A run is an arithmetic progression of tokens; a rectangle is a query run x a key run. The tiles of a branch
are computed in three steps: cut both sides of each rectangle into runs of one label, join the runs with equal
labels, and drop the rows and columns of the result that have no pair in the band of distances. Several
branches with the same band are handled together. If they are a product of alternatives (documents x
dilations), the rectangles are refined by one factor after the other; factors that are all dilations have a
faster algorithm ([Note: smallest segment], [Note: levels]). Both are optimisations: the plain derivation
gives the same pairs, as tests show.

LongNet's dilations are few large rectangles, where the plain join would make many small ones: two rewrites of
a sum of `Residue` branches (every r-th token of a segment attends to the same). Both give every pair its
multiplicity m (how many branches have the pair). `tests/unit/masks/test_branches.py` compares both with the
plain derivation.

[Note: smallest segment]
If every rate divides the next one and the offsets agree, the tokens of branch i + 1 are a subset of those of
branch i. If the segments nest as well, the smallest segment that contains both tokens of a pair decides: if
it belongs to branch i, both must be tokens of branch i, and m counts the branches from i on that have both.
So there is one large rectangle for each two neighbouring segments, in which nothing is masked and m is
periodic (`Weights`). The kernel adds log m as a bias, which costs 5 %; small tiles of constant m would cost
25 %. A branch whose rate is at least the segment's length has at most one token in the segment. It only adds
to the pair of that token with itself, which is a tile of its own; so the period stays below the length.

[Note: levels]
If branches do not nest, the branches that two tokens have in common follow from the residues of their
positions modulo the least common multiple of the rates. There is a rectangle for each combination of residues
with equal common branches. In it, m is the number of common branches whose segment contains both tokens. If
the multiple is too large, or a rate does not divide its segment, each branch is computed by itself: merging
the partial results counts a pair m times, and some work is done twice.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ds_ring.masks.branches import ALL, Branch, Partition, Pieces, Primitive, Residue
from ds_ring.masks.cuts import within_distances
from ds_ring.masks.tiles import Axis, IntArray, MaskInside, PairMask, Tiles, Weights, repeat_rows

MAX_RESIDUES = 1024  # least common multiples of the rates up to here are enumerated


class Progression(NamedTuple):
    """Describe the positions p = residue (mod modulus)."""

    residue: int
    modulus: int


class CommonBranches(NamedTuple):
    """Queries and keys whose common branches are exactly `branches`."""

    queries: tuple[Progression, ...]
    keys: tuple[Progression, ...]
    branches: tuple[int, ...]


def refine_dilations(tiles: Tiles, residues: list[Residue], causal: bool) -> list[Tiles]:
    """Return the rectangles of a sum of dilations, every pair with its m.

    If `causal`, keys after their query may be left out: the band will drop them.
    """
    residues = sorted(residues, key=lambda residue: residue.length)
    lengths = tuple(r.length for r in residues)
    rates, offsets = tuple(r.rate for r in residues), tuple(r.offset for r in residues)
    # a single segment starts at position 0: its length need not be a multiple of the rate
    reaches = int(max(tiles.q.last_position.max(), tiles.k.last_position.max())) if len(tiles) else 0
    if not all(w % r == 0 or w > reaches for w, r in zip(lengths, rates, strict=True)):
        # the offset inside a segment is then no residue of the position
        return [part for residue in residues for part in _one_branch(tiles, residue)]
    # segments are unions of those of the branch before, and tokens a subset of its tokens
    nested = all(
        b.length % a.length == 0 and b.rate % a.rate == 0 and b.offset % a.rate == a.offset
        for a, b in itertools.pairwise(residues)
    )
    # a tile has room for one `Weights`
    if nested and (tiles.weight < 0).all():
        return _by_segment(tiles, residues, causal)
    parts = []
    for share in common_branches(rates, offsets):
        sides = itertools.product(share.queries, share.keys)
        on = Tiles.concat([tiles.sides(tiles.q.residue(*q), tiles.k.residue(*k)) for q, k in sides])
        for chain in _chains(share.branches, lengths):
            parts += _levels(on, [lengths[i] for i in chain], causal)
    return parts


def _by_segment(tiles: Tiles, residues: list[Residue], causal: bool) -> list[Tiles]:
    """Refine by nested branches; see [Note: smallest segment]."""
    classes, parts = tuple((r.offset, r.rate) for r in residues), []
    for index, length in enumerate(r.length for r in residues):
        inside = tiles.sides(tiles.q.residue(*classes[index]), tiles.k.residue(*classes[index]))
        # at most one token in a segment: such a class adds to the pair of a token with itself only
        far = [c for c in classes[index + 1 :] if c[1] >= length]
        if index == 0:
            found = [_same_segment(inside, length)]
            parts += [found[0].sides(found[0].q.residue(*c), found[0].k.residue(*c)) for c in far]
        else:
            found = _between_segments(inside, residues[index - 1].length, length, causal)
        near = classes[index : len(classes) - len(far)]
        parts += [part.weighted(Weights(near)) for part in found]
    return parts


def _levels(tiles: Tiles, lengths: list[int], causal: bool) -> list[Tiles]:
    """Return pairs that share a segment of the nested `lengths`, by the smallest one that they share."""
    # a pair that shares the smallest segment shares all of them
    parts = [_same_segment(tiles, lengths[0]).times(len(lengths))]
    for index, (small, large) in enumerate(itertools.pairwise(lengths)):
        for part in _between_segments(tiles, small, large, causal):
            # shares the segments from number index + 1 on
            parts.append(part.times(len(lengths) - index - 1))
    return parts


def _one_branch(tiles: Tiles, branch: Residue) -> list[Tiles]:
    """Refine by one branch alone, segment by segment: the general case."""
    if branch.offset >= branch.length:
        return []
    inside = _same_segment(tiles, branch.length)
    # inside one segment the offset is a residue, which differs from segment to segment
    residue = (inside.q.position // branch.length * branch.length + branch.offset) % branch.rate
    return [inside.sides(inside.q.residue(residue, branch.rate), inside.k.residue(residue, branch.rate))]


def _same_segment(tiles: Tiles, length: int) -> Tiles:
    """Return the part of every rectangle whose queries and keys are in one segment."""
    # numbers of the first and the last segment that both sides reach
    first = np.maximum(tiles.q.position, tiles.k.position) // length
    last = np.minimum(tiles.q.last_position, tiles.k.last_position) // length
    row, which = repeat_rows(np.maximum(last - first + 1, 0))
    start = (first[row] + which) * length
    tiles = tiles.rows(row)
    return tiles.sides(tiles.q.between(start, start + length), tiles.k.between(start, start + length))


def _between_segments(tiles: Tiles, small: int, large: int, causal: bool) -> list[Tiles]:
    """Return the pairs that share a segment of length `large` but not of `small`, which divides it."""
    # queries whose large segment may have keys of the rectangle; one row for each of their small ones
    low = np.maximum(tiles.q.position, tiles.k.position // large * large)
    high = np.minimum(tiles.q.last_position, (tiles.k.last_position // large + 1) * large - 1)
    first, last = low // small, high // small
    row, which = repeat_rows(np.maximum(last - first + 1, 0))
    start = (first[row] + which) * small
    outer = start // large * large
    tiles = tiles.rows(row)
    q = tiles.q.between(start, start + small)
    # keys of the large segment before the small one, and after it unless the band drops them
    parts = [tiles.sides(q, tiles.k.between(outer, start))]
    if not causal:
        parts.append(tiles.sides(q, tiles.k.between(start + small, outer + large)))
    return parts


def _chains(branches: tuple[int, ...], lengths: tuple[int, ...]) -> list[list[int]]:
    """Group branches greedily so that in each group every length divides the next."""
    chains: list[list[int]] = []
    for branch in branches:
        for chain in chains:
            if lengths[branch] % lengths[chain[-1]] == 0:
                chain.append(branch)
                break
        else:
            chains.append([branch])
    return chains


@lru_cache(maxsize=256)
def common_branches(rates: tuple[int, ...], offsets: tuple[int, ...]) -> tuple[CommonBranches, ...]:
    """Return which positions have which branches in common; see [Note: levels]."""
    period = math.lcm(*rates)
    if period > MAX_RESIDUES:
        # each branch by itself; the merge sums pairs that several branches share
        classes = (Progression(o, r) for r, o in zip(rates, offsets, strict=True))
        return tuple(CommonBranches((own,), (own,), (i,)) for i, own in enumerate(classes))
    # residues modulo the period, by the set of branches that have them
    by_branches: dict[frozenset[int], list[int]] = defaultdict(list)
    for residue in range(period):
        inside = frozenset(i for i, r in enumerate(rates) if residue % r == offsets[i])
        if inside:
            by_branches[inside].append(residue)
    # by common branches and keys: the queries, so that equal rows make one rectangle
    rectangles: dict[tuple[frozenset[int], tuple[int, ...]], list[int]] = defaultdict(list)
    for own, queries in by_branches.items():
        keys_of: dict[frozenset[int], list[int]] = defaultdict(list)
        for other, keys in by_branches.items():
            if own & other:
                keys_of[own & other] += keys
        for common, keys in keys_of.items():
            rectangles[common, tuple(sorted(keys))] += queries
    return tuple(
        CommonBranches(_progressions(queries, period), _progressions(keys, period), tuple(sorted(common)))
        for (common, keys), queries in rectangles.items()
    )


def _progressions(residues: Iterable[int], period: int) -> tuple[Progression, ...]:
    """Return a set of residues modulo `period` as few progressions, the coarsest first."""
    left, found = set(residues), []
    for modulus in (d for d in range(1, period + 1) if period % d == 0):
        for residue in range(modulus):
            members = set(range(residue, period, modulus))
            if members <= left:
                left -= members
                found.append(Progression(residue, modulus))
        if not left:
            break
    return tuple(found)


MASK_BLOCK = 256  # side of the blocks inside which a mask function is evaluated, tokens

BandOfPairs = tuple[int, int, tuple[PairMask, ...]]  # least and most distance, mask functions
Joined = tuple[Primitive, Primitive]  # the primitives of queries and of keys whose labels are compared


def tiles_by_head(
    branches_by_head: tuple[tuple[Branch, ...], ...], rectangles: Tiles, plain: bool = False
) -> Tiles:
    """Return the non-empty tiles of whole rectangles; see [Note: joins].

    Args:
        branches_by_head: the branches of every query head of a group; one entry if all heads are equal.
        rectangles: without a band.
        plain: skip the optimisations and handle each branch by itself.
    """
    # An empty table, put first wherever tables are concatenated, so that there is at least one.
    nothing = rectangles.rows(np.zeros(len(rectangles), dtype=bool))
    # Group by band, so that the rectangles of all heads are cut by a band in one call.
    bands: dict[BandOfPairs, list[tuple[int, list[Branch]]]] = {}
    for number, whole in enumerate(branches_by_head):
        of_head: dict[BandOfPairs, list[Branch]] = {}
        for branch in whole:
            of_head.setdefault((branch.least, branch.most, branch.masks), []).append(branch)
        for band, alike in of_head.items():
            bands.setdefault(band, []).append((number if len(branches_by_head) > 1 else -1, alike))
    parts = []
    for (least, most, masks), jobs in bands.items():
        # Before the joins: rectangles outside the band need no refinement.
        near = may_touch(rectangles, least, most)
        refined = [nothing]
        for head_in_group, branches in jobs:
            refined += _refine(near.for_head(head_in_group), branches, least >= 0, plain)
        found = refined[1] if len(refined) == 2 else Tiles.concat(refined)
        if masks:
            # The mask function includes the band, so blocks are kept or dropped, but not cut.
            blocks = may_touch(_in_blocks(found), least, most)
            column = np.zeros(len(blocks), dtype=np.int64)
            parts.append(replace(blocks, mask=column, masks=(MaskInside(masks, least, most),)))
        else:
            parts.append(within_distances(found, least, most))
    return parts[0] if len(parts) == 1 else Tiles.concat([nothing, *parts])


def may_touch(tiles: Tiles, least: int, most: int) -> Tiles:
    """Drop rectangles that are entirely outside the band."""
    nearest, farthest = tiles.distances
    keep = (farthest >= least) & (nearest <= most)
    return tiles if keep.all() else tiles.rows(keep)


def _in_blocks(tiles: Tiles) -> Tiles:
    """Cut every rectangle into blocks of at most `MASK_BLOCK` x `MASK_BLOCK` tokens."""
    q_parts, k_parts = -(-tiles.q.length // MASK_BLOCK), -(-tiles.k.length // MASK_BLOCK)
    row, which = repeat_rows(q_parts * k_parts)
    q_first, k_first = which // k_parts[row] * MASK_BLOCK, which % k_parts[row] * MASK_BLOCK
    cut = tiles.rows(row)
    q_length = np.minimum(MASK_BLOCK, cut.q.length - q_first)
    return cut.take(q_first, q_length, k_first, np.minimum(MASK_BLOCK, cut.k.length - k_first))


def _refine(tiles: Tiles, branches: list[Branch], causal: bool, plain: bool) -> list[Tiles]:
    """Return the rectangles of branches with one band, before they are cut by the band."""
    by_ranges: dict[tuple[Partition, Partition], list[tuple[Joined, ...]]] = {}
    for branch in branches:
        ranges = replace(branch.queries, primitives=()), replace(branch.keys, primitives=())
        by_ranges.setdefault(ranges, []).append(branch.labels_of)
    parts = []
    for (queries, keys), joined in by_ranges.items():
        near = tiles
        if queries != ALL or keys != ALL:
            q = tiles.q if queries == ALL else tiles.q.between(queries.first, queries.end)
            near = tiles.sides(q, tiles.k if keys == ALL else tiles.k.between(keys.first, keys.end))
        products = [[[pair] for pair in one] for one in joined] if plain else _factors(joined)
        for factors in products:
            refined = near
            for factor in factors:
                refined = _refine_by(refined, factor, causal, plain)
            parts.append(refined)
    return parts


def _factors(joined: list[tuple[Joined, ...]]) -> list[list[list[Joined]]]:
    """Write alternatives, each a conjunction, as products of sums: one product if all combinations occur."""
    columns = [list(dict.fromkeys(column)) for column in zip(*joined, strict=False)]
    lengths = {len(one) for one in joined}
    # If there are as many distinct conjunctions as combinations, they are all combinations.
    whole = math.prod(len(column) for column in columns)
    if len(lengths) == 1 and len(joined) == len(set(joined)) == whole:
        return [columns]
    return [[[pair] for pair in one] for one in joined]


def _refine_by(tiles: Tiles, factor: list[Joined], causal: bool, plain: bool) -> Tiles:
    """Return the rectangles refined by a sum of alternatives."""
    # The faster algorithm is for dilations that label both sides in the same way.
    residues = [queries for queries, keys in factor if isinstance(queries, Residue) and queries == keys]
    if len(residues) == len(factor) and not plain:
        return Tiles.concat(
            [tiles.rows(np.zeros(len(tiles), dtype=bool)), *refine_dilations(tiles, residues, causal)]
        )
    parts = [join(tiles, queries, keys) for queries, keys in factor]
    return parts[0] if len(parts) == 1 else Tiles.concat(parts)


def join(tiles: Tiles, queries: Primitive, keys: Primitive) -> Tiles:
    """Cut every rectangle into rectangles whose two sides have one and the same label."""
    (q_least, q_greatest), (k_least, k_greatest) = queries.bounds(tiles.q), keys.bounds(tiles.k)
    # only labels that may occur on both sides can be equal
    least, greatest = np.maximum(q_least, k_least), np.minimum(q_greatest, k_greatest)
    q_row, q, q_label = _pieces_between(queries, tiles.q, least, greatest)
    k_row, k, k_label = _pieces_between(keys, tiles.k, least, greatest)
    # One number for each (rectangle, label). All labels are from least to greatest, so that the numbers of
    # two rectangles never overlap.
    width = 1 + int((greatest - least).max(initial=0))
    ours, theirs = (q_row * width + q_label - least[q_row]), (k_row * width + k_label - least[k_row])
    # If each number occurs once and in the same order on both sides, pieces pair up without a search.
    if np.array_equal(ours, theirs) and (np.diff(ours) > 0).all():
        return tiles.rows(q_row).sides(q, k)
    # all pairs of equal numbers, in the order of `ours`
    order = np.argsort(theirs, kind="stable")
    ordered = theirs[order]
    first = np.searchsorted(ordered, ours, side="left")
    count = np.searchsorted(ordered, ours, side="right") - first
    q_index, which = repeat_rows(count)
    k_index = order[first[q_index] + which]
    return tiles.rows(q_row[q_index]).sides(q.rows(q_index), k.rows(k_index))


def _pieces_between(primitive: Primitive, axis: Axis, least: IntArray, greatest: IntArray) -> Pieces:
    """Return the pieces of every row with labels from least to greatest; `split` may return others."""
    pieces = primitive.split(axis, least, greatest)
    kept = (pieces.label >= least[pieces.row]) & (pieces.label <= greatest[pieces.row])
    return pieces if kept.all() else Pieces(pieces.row[kept], pieces.axis.rows(kept), pieces.label[kept])
