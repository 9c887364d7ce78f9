"""Patterns: which query position attends to which key position. Declarative, in global positions.

Owns what all patterns have in common: composition, and everything that is derived from their branches. A
pattern says what its branches are (`Pattern.branches`, see `branches.py`) and nothing else; it knows no
layout, no rank and no tensor library. Each pattern has its own file beside this one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import numpy as np

from ds_ring.checked_numbers import whole_number
from ds_ring.errors import RingPatternError
from ds_ring.masks.branches import Branch, counts_twice, product, union
from ds_ring.masks.joins import tiles_by_head
from ds_ring.masks.near_runs import near_pairs
from ds_ring.masks.pair_mask import MaskFunction, PairMask
from ds_ring.masks.tiles import Tiles
from ds_ring.registry import JsonKey

IntArray = np.ndarray


class Head(NamedTuple):
    """Name a query head by its number, among how many query and K/V heads of the model."""

    number: int = 0
    query_heads: int = 1
    kv_heads: int = 1


@dataclass(frozen=True)
class Pattern(ABC):
    """Serve as the base of all patterns; instances are frozen values and hash by their contents.

    Compose with `&` (attend where both do) and `|` (attend where either does).
    """

    json_key: ClassVar[JsonKey | None] = None

    @abstractmethod
    def branches(self, head: Head) -> tuple[Branch, ...]:
        """Return what a query head attends to, as a sum of branches: one or more, as many for every head."""

    @property
    def conjuncts(self) -> tuple[Pattern, ...]:
        """Return the patterns that `&` put together; itself where there is nothing to take apart."""
        return (self,)

    @cached_property
    def _of_one_head(self) -> tuple[Branch, ...]:
        """Return the branches of head 0: for what is the same for all heads."""
        return self.branches(Head())

    @cached_property
    def distance(self) -> tuple[int, int]:
        """Return least and most of (query position - key position) that attend; +-UNBOUNDED where open."""
        bounds = [branch.distance for branch in self._of_one_head]
        return min(least for least, _ in bounds), max(most for _, most in bounds)

    @cached_property
    def is_causal(self) -> bool:
        """Return whether no query sees a key after itself."""
        return all(branch.is_causal for branch in self._of_one_head)

    @property
    def masks(self) -> tuple[PairMask, ...]:
        """Return the predicates of single pairs, which only a kernel can evaluate."""
        return tuple(dict.fromkeys(mask for branch in self._of_one_head for mask in branch.masks))

    @property
    def known_tokens(self) -> tuple[int, ...]:
        """Return the lengths of sequence that it was made from; empty where it goes with any."""
        sides = (side for branch in self._of_one_head for side in (branch.queries, branch.keys))
        primitives = dict.fromkeys(primitive for side in sides for primitive in side.primitives)
        return tuple(tokens for primitive in primitives for tokens in primitive.known_tokens)

    def bind(self, heads: tuple[int, ...], query_heads: int, kv_heads: int) -> BoundPattern:
        """Return the pattern of the query heads that share one K/V head; equal ones mean equal needs."""
        each = [self.branches(Head(head, query_heads, kv_heads)) for head in heads]
        # predicates for the heads of the whole group: heads that differ in nothing else stay one entry
        together = [_asked_together(each, branches) for branches in each]
        if all(branches == together[0] for branches in together):
            return BoundPattern((together[0],))
        # heads that differ have an entry each, whose predicates are asked for that head alone
        return BoundPattern(tuple(_asked_together([branches], branches) for branches in each))

    def check(self, tokens: int, samples: int, query_heads: int, device: str) -> None:
        """Refuse a pattern that cannot be evaluated for such a call, before anything is sent.

        Args:
            tokens: of the sequence.
            samples: size of the batch.
            query_heads: number of all query heads.
            device: of the tensors.

        Raises:
            RingPatternError: a mask function that fails there, or is no longer what it was.
        """
        for mask in self.masks:
            mask.check(tokens, samples, query_heads, device)

    def multiplicity(self, head: int, query_heads: int, kv_heads: int, q: Any, k: Any) -> Any:
        """Return how often query position q attends to key position k (0: not); int arrays, broadcast."""
        total: Any = np.zeros(np.broadcast_shapes(q.shape, k.shape), dtype=np.int64)
        # labels are defined from position 0 on; `mask` leaves out padding (-1) afterwards
        ours, theirs = (np.maximum(x, 0).reshape(-1) for x in (q, k))
        gap = q - k
        for branch in self.branches(Head(head, query_heads, kv_heads)):
            q_label, k_label = branch.labels(ours, theirs)
            q_label, k_label = q_label.reshape(q.shape), k_label.reshape(k.shape)
            found = (q_label == k_label) & (q_label >= 0) & (gap >= branch.least) & (gap <= branch.most)
            for mask in branch.masks:
                found = found & mask.pairs(*(np.broadcast_to(np.maximum(x, 0), found.shape) for x in (q, k)))
            total += found
        return total

    def mask(
        self,
        q_positions: IntArray,
        k_positions: IntArray,
        head: int = 0,
        query_heads: int = 1,
        kv_heads: int = 1,
    ) -> np.ndarray:
        """Return the dense mask of two lists of positions, bool [len(q), len(k)]; -1 attends to nothing."""
        q, k = q_positions[:, None], k_positions[None, :]
        return (self.multiplicity(head, query_heads, kv_heads, q, k) > 0) & (q >= 0) & (k >= 0)

    def tiles(self, q_runs: IntArray, k_runs: IntArray) -> Tiles:
        """Return the tiles of the only head of a model; `bind` says for which heads in general."""
        return self.bind((0,), 1, 1).tiles(q_runs, k_runs)

    def __and__(self, other: Pattern) -> Pattern:
        """Attend where both do."""
        return Intersection(self, _checked(other, "&"))

    def __or__(self, other: Pattern) -> Pattern:
        """Attend where either does.

        Raises:
            RingPatternError: the pairs of both can be told apart by no band and no range of positions.
        """
        either = Union(self, _checked(other, "|"))
        # refused here, where it is written, and not when a plan is built
        either.branches(Head())
        return either


def check_numbers(pattern: Pattern, *names: str) -> None:
    """Make the named fields of a pattern whole numbers, numpy's as well.

    Raises:
        RingPatternError: one is not a positive integer; names pattern and field.
    """
    for name in names:
        what = f"{type(pattern).__name__}: {name}"
        object.__setattr__(pattern, name, whole_number(getattr(pattern, name), what, RingPatternError))


def _checked(other: object, operator: str) -> Pattern:
    if not isinstance(other, Pattern):
        raise RingPatternError(f"{operator}: expected a pattern on both sides, got {type(other).__name__}")
    return other


def _asked_together(each: list[tuple[Branch, ...]], branches: tuple[Branch, ...]) -> tuple[Branch, ...]:
    """Return branches whose predicates are asked for the heads of all of `each`, in one go."""
    asked = list(branches)
    for index, branch in enumerate(branches):
        masks = (
            mask.for_heads(tuple(head for one in each for head in one[index].masks[number].heads))
            for number, mask in enumerate(branch.masks)
        )
        asked[index] = replace(branch, masks=tuple(masks)) if branch.masks else branch
    return tuple(asked)


@dataclass(frozen=True)
class BoundPattern(Pattern):
    """Hold a pattern for the query heads of one K/V head: what plans and kernels work with.

    Attributes:
        branches_by_head: of every query head of the group, as many for each; one entry if all are equal.
    """

    branches_by_head: tuple[tuple[Branch, ...], ...]

    def branches(self, head: Head) -> tuple[Branch, ...]:
        return self.branches_by_head[min(head.number, len(self.branches_by_head) - 1)]

    def bind(self, heads: tuple[int, ...], query_heads: int, kv_heads: int) -> BoundPattern:
        return self

    @cached_property
    def counts_twice(self) -> bool:
        """Return whether some pair may have m > 1."""
        return any(counts_twice(branches) for branches in self.branches_by_head)

    @cached_property
    def bands(self) -> tuple[tuple[int, int, tuple[MaskFunction, ...]], ...]:
        """Return least and most distance and mask functions: once where all branches agree, else of each."""
        branches = self.branches_by_head[0]
        bands = tuple((b.least, b.most, tuple(mask.function for mask in b.masks)) for b in branches)
        return bands[:1] if len(set(bands)) == 1 else bands

    @cached_property
    def mask_heads(self) -> tuple[int, ...]:
        """Return the numbers of the query heads of a group, where a mask depends on them; else (0,)."""
        heads = [
            next((mask.heads for branch in branches for mask in branch.masks if mask.heads), ())
            for branches in self.branches_by_head
        ]
        return sum(heads, ()) or (0,)

    def tiles(self, q_runs: IntArray, k_runs: IntArray) -> Tiles:
        """Return the non-empty tiles of two shards given by their runs (start, step, length), slot order."""
        branches = {branch for one in self.branches_by_head for branch in one}
        return self.cut(Tiles.rectangles(q_runs, k_runs, near_pairs(branches, q_runs, k_runs)))

    def cut(self, rectangles: Tiles) -> Tiles:
        """Return the non-empty tiles of some rectangles."""
        return tiles_by_head(self.branches_by_head, replace(rectangles, rule=self))

    def labels(self, q: IntArray, k: IntArray) -> tuple[IntArray, IntArray]:
        """Label query and key positions, int64 [heads, branches, n] and [heads, branches, m]."""
        found = [[branch.labels(q, k) for branch in branches] for branches in self.branches_by_head]
        return tuple(np.array([[pair[side] for pair in one] for one in found]) for side in (0, 1))  # type: ignore[return-value]

    def phase(self, start: int, length: int) -> tuple[Any, ...] | None:
        """Return what attention among positions start .. start + length - 1 owes to where they begin.

        Two stretches of one length with equal phases are attended alike, position by position; None: nobody
        knows. It saves making the same tiles again and again.
        """
        found: list[Any] = []
        for branch in (branch for branches in self.branches_by_head for branch in branches):
            if branch.masks:
                return None
            for side in (branch.queries, branch.keys):
                # the part of the stretch that is in range
                if not side.is_everywhere:
                    found.append(tuple(min(max(x - start, 0), length) for x in (side.first, side.end)))
            for ours, theirs in branch.labels_of:
                # two different primitives need not shift together
                phase = ours.phase(start, length) if ours == theirs else None
                if phase is None:
                    return None
                found.append(phase)
        return tuple(found)


@dataclass(frozen=True)
class Intersection(Pattern):
    """Attend where both of two patterns do: `a & b`."""

    first: Pattern
    second: Pattern

    def branches(self, head: Head) -> tuple[Branch, ...]:
        return product(self.first.branches(head), self.second.branches(head))

    @property
    def conjuncts(self) -> tuple[Pattern, ...]:
        return self.first.conjuncts + self.second.conjuncts

    def __str__(self) -> str:
        return f"{self.first} & {self.second}"


@dataclass(frozen=True)
class Union(Pattern):
    """Attend where one pattern or the other does, each pair counted once: `a | b`.

    Raises:
        RingPatternError: when asked for its branches, if the pairs of both cannot be told apart.
    """

    first: Pattern
    second: Pattern

    def branches(self, head: Head) -> tuple[Branch, ...]:
        found = union(self.first.branches(head), self.second.branches(head))
        if found is None:
            raise RingPatternError(
                f"{self.first} | {self.second}: expected two patterns of which one is told by a band of"
                " distances and ranges of positions alone, so that what both attend to counts once; got pairs"
                " of both that no band and no range tells apart. Write the whole as MaskMod"
            )
        return found

    def __str__(self) -> str:
        return f"({self.first} | {self.second})"
