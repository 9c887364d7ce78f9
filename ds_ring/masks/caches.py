"""Caches of what is made of patterns and of tables of tiles.

[Note: captured tensors in caches]
A mask function holds copies of the tensors that it captured, and a training loop may make one for each batch.
So a result that is made of a table goes with the table. Patterns with much captured memory share a few
entries of a cache.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, update_wrapper
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

from ds_ring.masks.pattern import Pattern
from ds_ring.masks.tiles import Tiles

if TYPE_CHECKING:
    from ds_ring.masks.pair_masks import PairMask

P = ParamSpec("P")
T = TypeVar("T")

SMALL_BYTES = 1 << 18  # captured by a pattern that counts as any other
KEPT_LARGE = 8  # patterns with more: those of a few batches
KEPT_TABLES = 512


def find_large_masks(*values: object) -> tuple[PairMask, ...]:
    """Return the mask functions of patterns among these, or in tuples of them, that captured much memory."""
    masks: list[PairMask] = []
    for value in values:
        if type(value) is tuple:
            masks += find_large_masks(*value)
        elif isinstance(value, Pattern) and value.captured_bytes > SMALL_BYTES:
            masks += (mask.for_heads(()) for mask in value.masks)
    return tuple(masks)


class cache_by_pattern(Generic[P, T]):  # noqa: N801 - a decorator
    """As `lru_cache`, for the `KEPT_LARGE` latest patterns of those that captured much memory."""

    def __init__(self, maxsize: int, function: Callable[P, T]) -> None:
        self._small = lru_cache(maxsize)(function)
        self._large = lru_cache(KEPT_LARGE)(lambda masks: lru_cache(maxsize)(function))
        update_wrapper(self, function)

    def __call__(self, *arguments: P.args, **keywords: P.kwargs) -> T:
        masks = find_large_masks(*arguments)
        cached: Callable[P, T] = self._large(masks) if masks else self._small
        return cached(*arguments, **keywords)

    def cache_clear(self) -> None:
        """Drop all results."""
        self._small.cache_clear()
        self._large.cache_clear()


class cache_by_tiles(Generic[P, T]):  # noqa: N801 - a decorator
    """Cache results as long as their table, the first argument, lives; of the `KEPT_TABLES` latest tables."""

    def __init__(self, function: Callable[Concatenate[Tiles, P], T]) -> None:
        self._function = function
        self._results: WeakKeyDictionary[Tiles, dict[Any, T]] = WeakKeyDictionary()
        update_wrapper(self, function)

    def __call__(self, tiles: Tiles, *arguments: P.args, **keywords: P.kwargs) -> T:
        results = self._results.get(tiles)
        if results is None:
            while len(self._results) >= KEPT_TABLES:
                del self._results[next(iter(self._results))]
            results = self._results[tiles] = {}
        key = (arguments, *keywords.items())
        if key not in results:
            results[key] = self._function(tiles, *arguments, **keywords)
        return results[key]

    def cache_clear(self) -> None:
        """Drop all results."""
        self._results.clear()
