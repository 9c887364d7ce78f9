"""Compose patterns: `a & b` and `a | b`, and whether branches have pairs in common.

[Note: sum of branches] in `branches.py` has the algebra.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from ds_ring.errors import RingPatternError
from ds_ring.masks.branches import Branch
from ds_ring.masks.pattern import Pattern, QueryHead
from ds_ring.masks.slots import IntArray


def intersect(first: Pattern, second: object) -> Pattern:
    """Return the pattern `a & b`."""
    return Intersection(first, _check_operand(second, "&"))


def unite(first: Pattern, second: object) -> Pattern:
    """Return the pattern `a | b`, or raise RingPatternError where it is no sum of branches."""
    either = Union(first, _check_operand(second, "|"))
    # Raise here, at the line of the user that has the mistake, not later when a plan is built.
    either.branches(QueryHead())
    return either


def _check_operand(operand: object, operator: str) -> Pattern:
    if not isinstance(operand, Pattern):
        raise RingPatternError(f"{operator}: expected a pattern on both sides, got {type(operand).__name__}")
    return operand


@dataclass(frozen=True)
class Intersection(Pattern):
    """Attend where both of two patterns do: `a & b`."""

    made_in_graphs = True
    first: Pattern
    second: Pattern

    def branches(self, head: QueryHead) -> tuple[Branch, ...]:
        return product(self.first.branches(head), self.second.branches(head))

    @property
    def conjuncts(self) -> tuple[Pattern, ...]:
        return self.first.conjuncts + self.second.conjuncts

    def __str__(self) -> str:
        return f"{self.first} & {self.second}"


@dataclass(frozen=True)
class Union(Pattern):
    """Attend where at least one of two patterns does, each pair counted once: `a | b`."""

    made_in_graphs = True
    first: Pattern
    second: Pattern

    def branches(self, head: QueryHead) -> tuple[Branch, ...]:
        branches = union(self.first.branches(head), self.second.branches(head))
        if branches is None:
            raise RingPatternError(
                f"{self.first} | {self.second}: expected that bands and ranges of positions describe their"
                " common pairs, which must count once, got others; write the whole mask as one MaskMod"
            )
        return branches

    def __str__(self) -> str:
        return f"({self.first} | {self.second})"


def product(first: Iterable[Branch], second: Iterable[Branch]) -> tuple[Branch, ...]:
    """Return the branches of `a & b`: one for each combination of a branch of `a` and a branch of `b`."""
    both = []
    for a, b in itertools.product(first, second):
        least, most = max(a.least, b.least), min(a.most, b.most)
        both.append(Branch(a.queries & b.queries, a.keys & b.keys, least, most, a.masks + b.masks))
    # A pattern has at least one branch, so keep an empty one if all are empty.
    return tuple(branch for branch in both if not branch.is_empty) or tuple(both[:1])


def overlapping(first: tuple[Branch, ...], second: tuple[Branch, ...]) -> IntArray:
    """Return which branches have pairs in common, judged by ranges and bands alone; bool [n, m]."""
    bounds = []
    for branches in (first, second):
        rows = [(b.queries.first, b.queries.end, b.keys.first, b.keys.end, b.least, b.most) for b in branches]
        bounds.append(np.array(rows, dtype=np.int64).reshape(len(branches), 6).T)
    (q0, q1, k0, k1, low, high), (p0, p1, j0, j1, floor, top) = bounds[0][:, :, None], bounds[1][:, None]
    q_first, q_end = np.maximum(q0, p0), np.minimum(q1, p1)
    k_first, k_end = np.maximum(k0, j0), np.minimum(k1, j1)
    # A rectangle of positions contains every distance between the smallest and the largest of its corners.
    nearest = np.maximum(np.maximum(low, floor), q_first - k_end + 1)
    farthest = np.minimum(np.minimum(high, top), q_end - 1 - k_first)
    overlap: IntArray = (q_first < q_end) & (k_first < k_end) & (nearest <= farthest)
    return overlap


def counts_twice(branches: tuple[Branch, ...]) -> bool:
    """Return whether a pair may take part in more than one of the branches."""
    both = np.argwhere(np.triu(overlapping(branches, branches), 1)).tolist()
    return not all(_check_keys_differ(branches[first], branches[second]) for first, second in both)


def _check_keys_differ(first: Branch, second: Branch) -> bool:
    """Return whether labels alone show that no key takes part in both branches."""
    pairs = itertools.product(first.keys.primitives, second.keys.primitives)
    return any(ours.is_apart_from(theirs) for ours, theirs in pairs)


def union(first: tuple[Branch, ...], second: tuple[Branch, ...]) -> tuple[Branch, ...] | None:
    """Return the branches of `a | b`, each pair in one of them; None if the overlap cannot be subtracted."""
    if not overlapping(first, second).any():
        return first + second
    if counts_twice(first) or counts_twice(second):
        return None  # with m > 1 in one pattern, the m of a pair that both have is not defined
    branches = list(first)
    for branch in second:
        # first attempt: subtract from the new branch the pairs that other branches have already
        added = [branch]
        for earlier in branches:
            touched = overlapping(tuple(added), (earlier,)).any()
            if touched and _check_only_ranges_differ(earlier, branch):
                added = [piece for part in added for piece in subtract(part, earlier)]
            elif touched:
                break
        else:
            branches += added
            continue
        # second attempt: subtract the new branch from the others
        without = [branch]
        for earlier in reversed(branches):
            touched = overlapping((branch,), (earlier,)).any()
            if touched and not _check_only_ranges_differ(branch, earlier):
                return None
            without = (subtract(earlier, branch) if touched else [earlier]) + without
        branches = without
    return tuple(branches)


def _check_only_ranges_differ(taken: Branch, whole: Branch) -> bool:
    """Return whether ranges and band alone describe which pairs of `whole` are in `taken`."""
    # Every label and mask of `taken` also restricts `whole`, so none of them has to be negated.
    return set(taken.compared_labels) <= set(whole.compared_labels) and set(taken.masks) <= set(whole.masks)


def subtract(whole: Branch, taken: Branch) -> list[Branch]:
    """Return the pairs of `whole` outside the ranges and the band of `taken`, as at most six branches."""
    # The parts are disjoint: queries before and after the range, keys likewise, distances below and above the
    # band.
    parts = []
    for side in ("queries", "keys"):
        mine, limit = getattr(whole, side), getattr(taken, side)
        parts += [
            replace(whole, **{side: replace(mine, end=min(mine.end, limit.first))}),
            replace(whole, **{side: replace(mine, first=max(mine.first, limit.end))}),
        ]
        inside = replace(mine, first=max(mine.first, limit.first), end=min(mine.end, limit.end))
        whole = replace(whole, **{side: inside})
    parts += [
        replace(whole, most=min(whole.most, taken.least - 1)),
        replace(whole, least=max(whole.least, taken.most + 1)),
    ]
    return [part for part in parts if not part.is_empty]
