"""Dilated attention (Ding et al. 2023, LongNet) as ONE attention over the union of its branches' keys.

LongNet mixes its branches by their softmax denominators. That equals a single softmax over all keys with
log m added to the score, m the number of branches in which a pair takes part. Owns the split of a
rectangle into tiles.

[Note: smallest segment]
Where every rate divides the next one and the offsets agree, the tokens of branch i + 1 are a subset of those
of branch i; where segments nest as well, a pair is decided by the smallest segment that its two sides share.
If that is one of branch i, the pair is attended if both are tokens of branch i, and m counts the branches
from i on that have both. So there is one rectangle for each two neighbouring segments, as large as can be,
in which nothing is masked and m is periodic (`Weights`): large tiles are what a kernel is fast on.
A rate of at least the segment's length has one token at most in it, so it only adds to the pair of that token
with itself: a tile of its own in the smallest segments, and nothing beyond. The period stays below the
segment's length, and tiles of all segments are alike.

[Note: levels]
In general the common branches of a pair follow from the residues modulo the least common multiple of the
rates: rectangles of progressions on which they are constant. Within them m is the number of common branches
whose segment the two share, decided by the smallest one where segments nest. Where the multiple is too
large, or a rate does not divide its segment, each branch is computed by itself: the merge of partial results
adds duplicates up exactly as m does, and only some work is done twice.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ds_ring.checked_numbers import true_or_false, whole_number
from ds_ring.errors import RingPatternError, shown
from ds_ring.masks.key_multiplicity import Weights
from ds_ring.masks.mask_rule import NO_CLASS
from ds_ring.masks.pattern import Pattern
from ds_ring.masks.slot_ranges import IntArray
from ds_ring.masks.tiles import UNBOUNDED, Tiles, repeat_rows

MOST_RESIDUES = 1024  # least common multiples of the rates up to here are enumerated
HEAD_OFFSETS = ("paper", "paper_kv", "torchscale", "zero")


class Progression(NamedTuple):
    """Positions p = residue (mod modulus)."""

    residue: int
    modulus: int


class Share(NamedTuple):
    """Queries and keys whose common branches are exactly `branches`."""

    queries: tuple[Progression, ...]
    keys: tuple[Progression, ...]
    branches: tuple[int, ...]


@dataclass(frozen=True)
class Dilated(Pattern):
    """Several branches of (segment length, dilation rate), mixed by their softmax denominators.

    A pair takes part in branch i if both lie in the same segment of length w_i and both stand at offset
    o(h, i) modulo r_i inside it, and, if causal, the key is not after the query.

    Attributes:
        segment_lengths: w_i in tokens, strictly increasing; longer than the sequence means all of it.
        dilation_rates: r_i, strictly increasing, one for each segment length.
        causal: no key after its query.
        head_offsets: "paper": h mod r_i; "paper_kv": the same with the K/V head; "torchscale":
            h // ceil(H / r_i); "zero".

    Raises:
        RingPatternError: lists of different length, not positive, not increasing; unknown offset rule.
    """

    segment_lengths: tuple[int, ...]
    dilation_rates: tuple[int, ...]
    causal: bool = True
    head_offsets: str = "paper"

    def __post_init__(self) -> None:
        for name in ("segment_lengths", "dilation_rates"):
            values = _whole_numbers(getattr(self, name), name)
            object.__setattr__(self, name, values)
            if any(b <= a for a, b in itertools.pairwise(values)):
                raise RingPatternError(
                    f"Dilated: {name}: expected strictly increasing numbers, got {list(values)}"
                )
        if len(self.segment_lengths) != len(self.dilation_rates):
            raise RingPatternError(
                "Dilated: expected one dilation rate for each segment length: got"
                f" {len(self.segment_lengths)} lengths"
                f" and {len(self.dilation_rates)} rates"
            )
        true_or_false(self.causal, "Dilated: causal", RingPatternError)
        if not isinstance(self.head_offsets, str) or self.head_offsets not in HEAD_OFFSETS:
            raise RingPatternError(
                f"Dilated: head_offsets: expected one of {', '.join(HEAD_OFFSETS)}, got"
                f" {shown(self.head_offsets)}"
            )

    @property
    def distance(self) -> tuple[int, int]:
        return (0 if self.causal else -UNBOUNDED), UNBOUNDED

    def offsets(self, head: int, query_heads: int, kv_heads: int) -> tuple[int, ...]:
        """o(h, i) of every branch."""
        if self.head_offsets == "zero":
            return (0,) * len(self.dilation_rates)
        if self.head_offsets == "torchscale":
            return tuple(head // -(-query_heads // rate) for rate in self.dilation_rates)
        index = head if self.head_offsets == "paper" else head // (query_heads // kv_heads)
        return tuple(index % rate for rate in self.dilation_rates)

    def bind(self, heads: tuple[int, ...], query_heads: int, kv_heads: int) -> Pattern:
        offsets = tuple(self.offsets(head, query_heads, kv_heads) for head in heads)
        if len(set(offsets)) == 1:
            offsets = offsets[:1]
        return BoundDilated(self.segment_lengths, self.dilation_rates, self.causal, offsets)

    def refine(self, tiles: Tiles) -> Tiles:
        raise AssertionError("a dilated pattern depends on heads: bind it first")

    def multiplicity(self, head: int, query_heads: int, kv_heads: int, q: Any, k: Any) -> Any:
        offsets = self.offsets(head, query_heads, kv_heads)
        count = np.zeros(np.broadcast_shapes(q.shape, k.shape), dtype=np.int64)
        for w, r, o in zip(self.segment_lengths, self.dilation_rates, offsets, strict=True):
            same = (q // w == k // w) & ((q % w) % r == o) & ((k % w) % r == o)
            count += same & (k <= q) if self.causal else same
        return count


def _whole_numbers(given: object, name: str) -> tuple[int, ...]:
    """The numbers of a list.

    Raises:
        RingPatternError: no list, an empty one, or one of anything but positive integers.
    """
    if not isinstance(given, (list, tuple)) or not given:
        raise RingPatternError(f"Dilated: {name}: expected a list of positive integers, got {shown(given)}")
    try:
        return tuple(whole_number(x, name, RingPatternError) for x in given)
    except RingPatternError:
        text = shown(list(given)).removeprefix("list ")
        raise RingPatternError(f"Dilated: {name}: expected positive integers, got {text}") from None


@dataclass(frozen=True)
class BoundDilated(Pattern):
    """A dilated pattern for the query heads of one K/V head.

    Attributes:
        members: offsets of every branch, for each query head of the group; one entry if all are equal.
    """

    segment_lengths: tuple[int, ...]
    dilation_rates: tuple[int, ...]
    causal: bool
    members: tuple[tuple[int, ...], ...]

    @property
    def distance(self) -> tuple[int, int]:
        return (0 if self.causal else -UNBOUNDED), UNBOUNDED

    def refine(self, tiles: Tiles) -> Tiles:
        parts = [tiles.rows(np.zeros(len(tiles), dtype=bool))]
        for index, offsets in enumerate(self.members):
            parts += self._refine_one(tiles.for_member(index if len(self.members) > 1 else -1), offsets)
        return Tiles.concat(parts)

    def stretch(self, start: int, length: int) -> tuple[Any, ...] | None:
        """Per branch where its segments begin, and, inside one segment, where its first token is."""
        found: list[int] = []
        for w, r, *offsets in zip(self.segment_lengths, self.dilation_rates, *self.members, strict=True):
            if start // w != (start + length - 1) // w:
                found.append(start % w)
                continue
            found.append(-1)
            for first in ((offset - start % w) % r for offset in offsets):
                found.append(first if first < length else -1)
        return tuple(found)

    def labels(self, positions: IntArray) -> IntArray:
        w, r = (np.array(x)[None, :, None] for x in (self.segment_lengths, self.dilation_rates))
        held = positions % w % r == np.array(self.members)[:, :, None]
        return np.where(held, positions // w, NO_CLASS)

    def _refine_one(self, tiles: Tiles, offsets: tuple[int, ...]) -> list[Tiles]:
        lengths, rates = self.segment_lengths, self.dilation_rates
        # a single segment starts at position 0: its length need not be a multiple of the rate
        reaches = int(max(tiles.q.last_position.max(), tiles.k.last_position.max())) if len(tiles) else 0
        regular = all(w % r == 0 or w > reaches for w, r in zip(lengths, rates, strict=True))
        if not regular:
            return [part for i in range(len(lengths)) for part in self._one_branch(tiles, i, offsets[i])]
        if _nested(lengths, rates, offsets) and (tiles.weight < 0).all():
            return self._by_segment(tiles, offsets)
        parts = []
        for share in shares(rates, offsets):
            for chain in _chains(share.branches, lengths):
                parts += self._levels(_on(tiles, share), [lengths[i] for i in chain])
        return parts

    def _by_segment(self, tiles: Tiles, offsets: tuple[int, ...]) -> list[Tiles]:
        """Nested branches; see [Note: smallest segment]."""
        lengths, classes, parts = (
            self.segment_lengths,
            tuple(zip(offsets, self.dilation_rates, strict=True)),
            [],
        )
        for index, length in enumerate(lengths):
            inside = tiles.sides(tiles.q.residue(*classes[index]), tiles.k.residue(*classes[index]))
            far = [c for c in classes[index + 1 :] if c[1] >= length]
            if index == 0:
                found = [_same_segment(inside, length)]
                parts += [found[0].sides(found[0].q.residue(*c), found[0].k.residue(*c)) for c in far]
            else:
                found = _between_segments(inside, lengths[index - 1], length, self.causal)
            near = classes[index : len(classes) - len(far)]
            parts += [part.weighted(Weights(near)) for part in found]
        return parts

    def _levels(self, tiles: Tiles, lengths: list[int]) -> list[Tiles]:
        """Pairs that share a segment of the nested `lengths`, by the smallest one that they share."""
        parts = [_same_segment(tiles, lengths[0]).times(len(lengths))]
        for index, (small, large) in enumerate(itertools.pairwise(lengths)):
            for part in _between_segments(tiles, small, large, self.causal):
                parts.append(part.times(len(lengths) - index - 1))
        return parts

    def _one_branch(self, tiles: Tiles, branch: int, offset: int) -> list[Tiles]:
        """One branch by itself, segment by segment: the general case."""
        length, rate = self.segment_lengths[branch], self.dilation_rates[branch]
        if offset >= length:
            return []
        inside = _same_segment(tiles, length)
        start = inside.q.position // length * length
        parts = []
        for residue in np.unique((start + offset) % rate).tolist():
            part = inside.rows((start + offset) % rate == residue)
            parts.append(part.sides(part.q.residue(residue, rate), part.k.residue(residue, rate)))
        return parts


def _on(tiles: Tiles, share: Share) -> Tiles:
    """The rectangles restricted to the queries and keys of a share."""
    parts = [
        tiles.sides(tiles.q.residue(*queries), tiles.k.residue(*keys))
        for queries in share.queries
        for keys in share.keys
    ]
    return Tiles.concat(parts)


def _same_segment(tiles: Tiles, length: int) -> Tiles:
    """The part of every rectangle whose two sides lie in one segment."""
    first = np.maximum(tiles.q.position, tiles.k.position) // length
    last = np.minimum(tiles.q.last_position, tiles.k.last_position) // length
    row, which = repeat_rows(np.maximum(last - first + 1, 0))
    start = (first[row] + which) * length
    tiles = tiles.rows(row)
    return tiles.sides(tiles.q.between(start, start + length), tiles.k.between(start, start + length))


def _between_segments(tiles: Tiles, small: int, large: int, causal: bool) -> list[Tiles]:
    """The pairs that share a segment of length `large` but not of `small`, which divides it."""
    low = np.maximum(tiles.q.position, tiles.k.position // large * large)
    high = np.minimum(tiles.q.last_position, (tiles.k.last_position // large + 1) * large - 1)
    first, last = low // small, high // small
    row, which = repeat_rows(np.maximum(last - first + 1, 0))
    start = (first[row] + which) * small
    outer = start // large * large
    tiles = tiles.rows(row)
    q = tiles.q.between(start, start + small)
    parts = [tiles.sides(q, tiles.k.between(outer, start))]
    if not causal:
        parts.append(tiles.sides(q, tiles.k.between(start + small, outer + large)))
    return parts


def _chains(branches: tuple[int, ...], lengths: tuple[int, ...]) -> list[list[int]]:
    """The branches in groups, as few as a greedy walk finds, in which every length divides the next."""
    chains: list[list[int]] = []
    for branch in branches:
        for chain in chains:
            if lengths[branch] % lengths[chain[-1]] == 0:
                chain.append(branch)
                break
        else:
            chains.append([branch])
    return chains


def _nested(lengths: tuple[int, ...], rates: tuple[int, ...], offsets: tuple[int, ...]) -> bool:
    """Every branch's segments are unions of those of the one before it, and its tokens a subset."""
    return all(b % a == 0 for a, b in itertools.pairwise(lengths)) and all(
        b % a == 0 and y % a == x for (a, x), (b, y) in itertools.pairwise(zip(rates, offsets, strict=True))
    )


@lru_cache(maxsize=256)
def shares(rates: tuple[int, ...], offsets: tuple[int, ...]) -> tuple[Share, ...]:
    """Which positions have which branches in common; see [Note: levels]."""
    if math.lcm(*rates) <= MOST_RESIDUES:
        return tuple(_residue_shares(rates, offsets))
    classes = (Progression(o, r) for r, o in zip(rates, offsets, strict=True))
    return tuple(Share((own,), (own,), (i,)) for i, own in enumerate(classes))


def _residue_shares(rates: tuple[int, ...], offsets: tuple[int, ...]) -> list[Share]:
    period = math.lcm(*rates)
    by_branches: dict[frozenset[int], list[int]] = defaultdict(list)
    for residue in range(period):
        inside = frozenset(i for i, r in enumerate(rates) if residue % r == offsets[i])
        if inside:
            by_branches[inside].append(residue)
    rectangles: dict[tuple[frozenset[int], tuple[int, ...]], list[int]] = defaultdict(list)
    for own, queries in by_branches.items():
        keys_of: dict[frozenset[int], list[int]] = defaultdict(list)
        for other, keys in by_branches.items():
            if own & other:
                keys_of[own & other] += keys
        for common, keys in keys_of.items():
            rectangles[common, tuple(sorted(keys))] += queries
    return [
        Share(_progressions(queries, period), _progressions(list(keys), period), tuple(sorted(common)))
        for (common, keys), queries in rectangles.items()
    ]


def _progressions(residues: list[int], period: int) -> tuple[Progression, ...]:
    """A set of residues modulo `period` as few progressions, the coarsest first."""
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
