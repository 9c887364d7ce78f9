"""Residues: the labels of a dilation, and faster ways to the tiles of a sum of them.

LongNet's dilations are few large rectangles, where the plain join would make many small ones: two rewrites of
a sum of `Residue` branches (every r-th token of a segment attends to the same). Both give every pair its
multiplicity m (how many branches have the pair).

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
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ds_ring.masks.branches import NO_LABEL, Pieces, Primitive, Segment
from ds_ring.masks.slots import IntArray, repeat_rows
from ds_ring.masks.tiles import Axis, Tiles, Weights

MAX_RESIDUES = 1024  # least common multiples of the rates up to here are enumerated


@dataclass(frozen=True)
class Residue(Primitive):
    """Label every `rate`-th token of a segment, from `offset` on, by its segment: a dilation (LongNet).

    The label of position p is p // length if p % length % rate == offset; otherwise p takes no part.
    """

    tile_kind = (2, "LongNet")
    length: int
    rate: int
    offset: int

    def labels(self, positions: IntArray) -> IntArray:
        held = positions % self.length % self.rate == self.offset
        return np.where(held, positions // self.length, NO_LABEL)

    def bounds(self, axis: Axis) -> tuple[IntArray, IntArray]:
        # These bounds may be too wide: not every segment of the row has a token with this residue.
        first, last = Segment(self.length).bounds(axis)
        if self.length % self.rate and axis.last_position.max(initial=0) >= self.length:
            return first, last
        # The offset is a residue of the position. In the residue layout a shard has one run for every residue
        # of every window: nearly all of them have no token of this dilation.
        none = (self.offset - axis.position) % np.gcd(axis.position_step, self.rate) != 0
        return first, np.where(none, first - 1, last)

    def split(self, axis: Axis, least: IntArray, greatest: IntArray) -> Pieces:
        row, inside, label = Segment(self.length).split(axis, least, greatest)
        first = label * self.length + self.offset
        return Pieces(row, inside.residue(first % self.rate, self.rate), label)

    @classmethod
    def refine_sum(cls, tiles: Tiles, alternatives: list[Residue], causal: bool) -> Tiles:
        nothing = tiles.rows(np.zeros(len(tiles), dtype=bool))
        return Tiles.concat([nothing, *_refined(tiles, alternatives, causal)])


class Progression(NamedTuple):
    """Describe the positions p = residue (mod modulus)."""

    residue: int
    modulus: int


class CommonBranches(NamedTuple):
    """Queries and keys whose common branches are exactly `branches`."""

    queries: tuple[Progression, ...]
    keys: tuple[Progression, ...]
    branches: tuple[int, ...]


def _refined(tiles: Tiles, residues: list[Residue], causal: bool) -> list[Tiles]:
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
            pieces = [_same_segment(inside, length)]
            parts += [pieces[0].sides(pieces[0].q.residue(*c), pieces[0].k.residue(*c)) for c in far]
        else:
            pieces = _between_segments(inside, residues[index - 1].length, length, causal)
        near = classes[index : len(classes) - len(far)]
        parts += [_weighted(part, Weights(near)) for part in pieces]
    return parts


def _levels(tiles: Tiles, lengths: list[int], causal: bool) -> list[Tiles]:
    """Return pairs that share a segment of the nested `lengths`, by the smallest one that they share."""
    # a pair that shares the smallest segment shares all of them
    parts = [_times(_same_segment(tiles, lengths[0]), len(lengths))]
    for index, (small, large) in enumerate(itertools.pairwise(lengths)):
        for part in _between_segments(tiles, small, large, causal):
            # shares the segments from number index + 1 on
            parts.append(_times(part, len(lengths) - index - 1))
    return parts


def _one_branch(tiles: Tiles, branch: Residue) -> list[Tiles]:
    """Refine by one branch alone, segment by segment: the general case."""
    if branch.offset >= branch.length:
        return []
    inside = _same_segment(tiles, branch.length)
    # inside one segment the offset is a residue, which differs from segment to segment
    residue = (inside.q.position // branch.length * branch.length + branch.offset) % branch.rate
    return [inside.sides(inside.q.residue(residue, branch.rate), inside.k.residue(residue, branch.rate))]


def _times(tiles: Tiles, multiplicity: IntArray | int) -> Tiles:
    """Return the same tiles with the multiplicity of every pair multiplied by a number."""
    return replace(tiles, multiplicity=tiles.multiplicity * multiplicity)


def _weighted(tiles: Tiles, weights: Weights) -> Tiles:
    """Return the same tiles with the multiplicity of every pair multiplied by `weights` of the pair."""
    assert (tiles.weight < 0).all(), "expected tiles without weights, got tiles that have some"
    # a step that is a multiple of the period stays in its residue class
    stays = [(x.position_step % weights.period == 0) | (x.length <= 1) for x in (tiles.q, tiles.k)]
    varies = ~(stays[0] & stays[1])
    # Where m is constant inside a tile, put it into the multiplicity: the kernel then evaluates no function.
    constant = np.where(varies, 1, weights(tiles.q.position, tiles.k.position))
    return replace(_times(tiles, constant), weight=np.where(varies, 0, -1), weights=(weights,))


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
        return tuple(
            CommonBranches((progression,), (progression,), (i,)) for i, progression in enumerate(classes)
        )
    # residues modulo the period, by the set of branches that have them
    by_branches: dict[frozenset[int], list[int]] = defaultdict(list)
    for residue in range(period):
        inside = frozenset(i for i, r in enumerate(rates) if residue % r == offsets[i])
        if inside:
            by_branches[inside].append(residue)
    # by common branches and keys: the queries, so that equal rows make one rectangle
    rectangles: dict[tuple[frozenset[int], tuple[int, ...]], list[int]] = defaultdict(list)
    for branches, queries in by_branches.items():
        keys_of: dict[frozenset[int], list[int]] = defaultdict(list)
        for key_branches, keys in by_branches.items():
            if branches & key_branches:
                keys_of[branches & key_branches] += keys
        for common, keys in keys_of.items():
            rectangles[common, tuple(sorted(keys))] += queries
    return tuple(
        CommonBranches(_progressions(queries, period), _progressions(keys, period), tuple(sorted(common)))
        for (common, keys), queries in rectangles.items()
    )


def _progressions(residues: Iterable[int], period: int) -> tuple[Progression, ...]:
    """Return a set of residues modulo `period` as few progressions, the coarsest first."""
    left, progressions = set(residues), []
    for modulus in (d for d in range(1, period + 1) if period % d == 0):
        for residue in range(modulus):
            members = set(range(residue, period, modulus))
            if members <= left:
                left -= members
                progressions.append(Progression(residue, modulus))
        if not left:
            break
    return tuple(progressions)
