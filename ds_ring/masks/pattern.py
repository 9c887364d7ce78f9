"""Patterns: which query position attends to which key position, in global positions, independent of ranks.

A pattern only lists its branches (`Pattern.branches`, see `branches.py`); composition by `&` and `|`, and all
that is computed from branches, are in the base class. `catalog.py` has the simple patterns; the others are in
folders of `ds_ring/patterns`.

Terms: the multiplicity m of a (query, key) pair is the number of branches that contain it; log m is added to
the pair's score. A run is an arithmetic progression of positions (start, step, length).
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, wraps
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, ParamSpec, TypeVar, cast

import numpy as np

from ds_ring.errors import RingPatternError, check_whole_number
from ds_ring.masks.branches import ALL, Branch, Primitive
from ds_ring.masks.joins import split_by_head
from ds_ring.masks.slots import IntArray
from ds_ring.masks.tiles import UNBOUNDED, Axis, Tiles
from ds_ring.plugin import JsonKey

if TYPE_CHECKING:
    from ds_ring.masks.pair_masks import PairMask

P = ParamSpec("P")
T = TypeVar("T")
MANY_PAIRS = 4096  # of runs; if there are more, `tiles` first leaves out those that no branch joins


class QueryHead(NamedTuple):
    """Identify a query head: its number, and how many query heads and K/V heads there are.

    Patterns expect the number and the counts of the whole model. A Ulysses rank passes those of its own
    heads, and `HeadShard` converts them.
    """

    number: int = 0
    query_heads: int = 1
    kv_heads: int = 1


@dataclass(frozen=True)
class Pattern(ABC):
    """Serve as the base of all patterns; instances are frozen values and hash by their contents.

    Compose with `&` (attend where both do) and `|` (attend where either does).
    """

    json_key: ClassVar[JsonKey | None] = None
    # True: torch.compile may make this pattern inside a graph. Its fields must then be numbers, texts and
    # patterns of this kind.
    made_in_graphs = False

    @abstractmethod
    def branches(self, head: QueryHead) -> tuple[Branch, ...]:
        """Return the branches whose sum a query head attends to: at least one, for all heads equally many."""

    @property
    def conjuncts(self) -> tuple[Pattern, ...]:
        """Return the patterns that were combined with `&`; only itself if there was no `&`."""
        return (self,)

    @cached_property
    def _one_head_branches(self) -> tuple[Branch, ...]:  # for properties that are the same for all heads
        return self.branches(QueryHead())

    @cached_property
    def distance(self) -> tuple[int, int]:
        """Return the least and greatest (query position - key position) of a pair; +-UNBOUNDED if open."""
        bounds = [branch.distance for branch in self._one_head_branches]
        return min(least for least, _ in bounds), max(most for _, most in bounds)

    @cached_property
    def is_causal(self) -> bool:
        """Return whether no query attends to a key after itself."""
        return all(branch.is_causal for branch in self._one_head_branches)

    @cached_property
    def masks(self) -> tuple[PairMask, ...]:
        """Return the mask functions of single pairs: tiles refer to them, kernels evaluate them."""
        return tuple(dict.fromkeys(mask for branch in self._one_head_branches for mask in branch.masks))

    @cached_property
    def captured_bytes(self) -> int:
        """Return the memory of the tensors that mask functions captured."""
        return sum(mask.captured_bytes for mask in self.masks)

    @property
    def mask_ids(self) -> tuple[int, ...]:
        """Return the ids of the mask functions: they tell apart functions that compare equal by traces."""
        return tuple(mask.identity for mask in self.masks)

    @property
    def primitives(self) -> tuple[Primitive, ...]:
        """Return the functions that label positions, each once."""
        sides = (side for branch in self._one_head_branches for side in (branch.queries, branch.keys))
        return tuple(dict.fromkeys(primitive for side in sides for primitive in side.primitives))

    @cached_property
    def tile_kind(self) -> str:
        """Return the kind of tiles by which rates are measured (`tools/benchmarks/gpu_rates.py`)."""
        rank, name = max((primitive.tile_kind for primitive in self.primitives), default=(0, ""))
        if rank:
            return name
        branch = self._one_head_branches[0]
        least, most = branch.distance
        if least > -UNBOUNDED and most < UNBOUNDED:
            return "window"
        everywhere = branch.queries == ALL and least == -UNBOUNDED and most == UNBOUNDED
        return "full" if everywhere else "causal"

    def bind(self, heads: tuple[int, ...], query_heads: int, kv_heads: int) -> BoundPattern:
        """Return the pattern of the query heads that share one K/V head.

        Two K/V heads whose bound patterns are equal read the same tokens and share one plan.
        """
        each = [self.branches(QueryHead(head, query_heads, kv_heads)) for head in heads]
        # Mask functions of all heads of the group at once: heads that differ in these alone share one entry.
        together = {_combine_masks(each, branches) for branches in each}
        if len(together) == 1:
            return BoundPattern(tuple(together))
        # The heads differ: each has its own entry, with mask functions that are evaluated for it alone.
        return BoundPattern(tuple(_combine_masks([branches], branches) for branches in each))

    def check(self, tokens: int, samples: int, query_heads: int, device: str) -> None:
        """Raise RingPatternError if a mask function fails for a call of these sizes.

        Runs before anything is sent. `samples` is the batch size, `query_heads` the number on all ranks.
        """
        for mask in self.masks:
            mask.check(tokens, samples, query_heads, device)

    def check_unchanged(self) -> None:
        """Raise RingPatternError if a mask function has captured other values since it was made."""
        for mask in self.masks:
            mask.check_unchanged()

    def multiplicity(self, head: int, query_heads: int, kv_heads: int, q: Any, k: Any) -> Any:
        """Return m, how often query position q attends to key position k (0: not at all).

        q and k are int arrays of positions that broadcast; `QueryHead` explains the heads.
        """
        total: Any = np.zeros(np.broadcast_shapes(q.shape, k.shape), dtype=np.int64)
        # Labels are defined for positions >= 0; `mask` removes padding (position -1) afterwards.
        ours, theirs = (np.maximum(x, 0).reshape(-1) for x in (q, k))
        gap = q - k
        for branch in self.branches(QueryHead(head, query_heads, kv_heads)):
            q_label, k_label = branch.labels(ours, theirs)
            q_label, k_label = q_label.reshape(q.shape), k_label.reshape(k.shape)
            visible = (q_label == k_label) & (q_label >= 0) & (gap >= branch.least) & (gap <= branch.most)
            for mask in branch.masks:
                visible = visible & mask.pairs(
                    *(np.broadcast_to(np.maximum(x, 0), visible.shape) for x in (q, k))
                )
            total += visible
        return total

    def mask(
        self,
        q_positions: IntArray,
        k_positions: IntArray,
        head: int = 0,
        query_heads: int = 1,
        kv_heads: int = 1,
    ) -> np.ndarray:
        """Return the dense mask of two lists of positions, bool [len(q), len(k)].

        -1 (padding) never attends.
        """
        self.check_unchanged()
        q, k = q_positions[:, None], k_positions[None, :]
        return (self.multiplicity(head, query_heads, kv_heads, q, k) > 0) & (q >= 0) & (k >= 0)

    def tiles(self, q_runs: IntArray, k_runs: IntArray) -> Tiles:
        """Return the tiles for a model with one head; use `bind` for more heads."""
        return self.bind((0,), 1, 1).tiles(q_runs, k_runs)

    def __and__(self, pattern: Pattern) -> Pattern:
        """Attend where both patterns do."""
        from ds_ring.masks.compose import intersect

        return intersect(self, pattern)

    def __or__(self, pattern: Pattern) -> Pattern:
        """Attend where at least one of the two patterns does; a pair of both counts once.

        Raises:
            RingPatternError: the pairs of both patterns cannot be described by a band of distances and ranges
                of positions, so they cannot be subtracted from one of the two.
        """
        from ds_ring.masks.compose import unite

        return unite(self, pattern)


def check_numbers(pattern: object, *names: str) -> None:
    """Convert the named fields to Python ints; RingPatternError unless each is a positive integer."""
    for name in names:
        what = f"{type(pattern).__name__}: {name}"
        object.__setattr__(pattern, name, check_whole_number(getattr(pattern, name), what, RingPatternError))


def _combine_masks(each: list[tuple[Branch, ...]], branches: tuple[Branch, ...]) -> tuple[Branch, ...]:
    """Return `branches`, one head's, with mask functions that are evaluated once for all heads in `each`."""
    evaluated = list(branches)
    for index, branch in enumerate(branches):
        for number, mask in enumerate(branch.masks):
            heads = tuple(
                head for branches_of_head in each for head in branches_of_head[index].masks[number].heads
            )
            masks = (*evaluated[index].masks[:number], mask.for_heads(heads), *branch.masks[number + 1 :])
            evaluated[index] = replace(branch, masks=masks)
    return tuple(evaluated)


@dataclass(frozen=True)
class BoundPattern(Pattern):
    """A pattern for the query heads that share one K/V head: what `bind` returns. Plans and kernels use this.

    `branches_by_head` has one entry if all query heads of the group are equal, else one for each. All entries
    have the same number of branches.
    """

    branches_by_head: tuple[tuple[Branch, ...], ...]

    def branches(self, head: QueryHead) -> tuple[Branch, ...]:
        return self.branches_by_head[min(head.number, len(self.branches_by_head) - 1)]

    def bind(self, heads: tuple[int, ...], query_heads: int, kv_heads: int) -> BoundPattern:
        return self

    @property
    def is_same_for_heads(self) -> bool:
        """Return whether all query heads that it is bound to attend to the same pairs."""
        return len(self.branches_by_head) == 1 and self.mask_heads == (0,)

    @cached_property
    def counts_twice(self) -> bool:
        """Return whether some pair may be in more than one branch (m > 1)."""
        from ds_ring.masks.compose import counts_twice

        return any(counts_twice(branches) for branches in self.branches_by_head)

    @cached_property
    def bands(self) -> tuple[tuple[int, int, tuple[PairMask, ...]], ...]:
        """Return (least distance, most, mask functions) of each branch; one entry if all agree."""
        branches = self.branches_by_head[0]
        # Leave the head numbers out: the kernel that reads these functions passes the head itself.
        bands = tuple((b.least, b.most, tuple(mask.for_heads(()) for mask in b.masks)) for b in branches)
        return bands[:1] if len(set(bands)) == 1 else bands

    @cached_property
    def mask_heads(self) -> tuple[int, ...]:
        """Return the numbers of the group's query heads if a mask function depends on the head; else (0,)."""
        heads = [
            next((mask.heads for branch in branches for mask in branch.masks if mask.heads), ())
            for branches in self.branches_by_head
        ]
        return sum(heads, ()) or (0,)

    def tiles(self, q_runs: IntArray, k_runs: IntArray) -> Tiles:
        """Return the non-empty tiles of two shards, given by their runs in slot order, int64 [n, 3]."""
        near = None
        if len(q_runs) * len(k_runs) > MANY_PAIRS:
            from ds_ring.masks.near_rows import find_near_rows

            every = itertools.chain(*self.branches_by_head)
            near = find_near_rows(every, Axis.from_runs(q_runs), Axis.from_runs(k_runs))
        return self.cut(Tiles.rectangles(q_runs, k_runs, near))

    def cut(self, rectangles: Tiles) -> Tiles:
        """Cut rectangles of pairs into tiles and drop the empty ones."""
        return split_by_head(self.branches_by_head, replace(rectangles, rule=self))

    def labels(self, q: IntArray, k: IntArray) -> tuple[IntArray, IntArray]:
        """Return labels of query and key positions, int64 [heads, branches, n] and [heads, branches, m]."""
        by_head = [[branch.labels(q, k) for branch in branches] for branches in self.branches_by_head]
        return tuple(np.array([[pair[side] for pair in pairs] for pairs in by_head]) for side in (0, 1))  # type: ignore[return-value]


# [Note: captured tensors in caches] A training loop may make a mask for each batch. Each holds copies of the
# captured tensors. So caches keep at most `KEPT_LARGE` patterns that captured more than `SMALL_BYTES`.
SMALL_BYTES = 1 << 18
KEPT_LARGE = 8


def find_large_masks(value: Any) -> tuple[Any, ...]:
    """Return the mask functions with much captured memory of a pattern, a table of tiles, or several."""
    if type(value) is tuple:
        return tuple(mask for part in value for mask in find_large_masks(part))
    pattern = getattr(value, "rule", value)
    is_large = isinstance(pattern, Pattern) and pattern.captured_bytes > SMALL_BYTES
    return tuple(mask.for_heads(()) for mask in pattern.masks) if is_large else ()


_CACHES: list[Any] = []
_recent: dict[tuple[Any, ...], None] = {}  # mask functions with much captured memory that caches may hold


def cache_by_pattern(maxsize: int, function: Callable[P, T]) -> Callable[P, T]:
    """As `lru_cache`; all such caches are emptied before they hold more than `KEPT_LARGE` large masks."""

    @lru_cache(maxsize)
    @wraps(function)
    def compute(*arguments: P.args, **keywords: P.kwargs) -> T:
        if (masks := find_large_masks(arguments)) and masks not in _recent:
            if len(_recent) == KEPT_LARGE:
                _recent.clear()
                for cached in _CACHES:
                    cached.cache_clear()
            _recent[masks] = None
        return function(*arguments, **keywords)

    _CACHES.append(compute)
    return cast(Callable[P, T], compute)
