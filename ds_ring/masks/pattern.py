"""Patterns: which query position attends to which key position. Declarative, in global positions.

A pattern answers these questions and nothing else: the tiles of two shards (for the plan), how often a
pair is attended (for masks and references), and which heads share an answer. All are tested against each
other.
A pattern knows no layout, no rank and no tensor library. Dilated and documents have rooms of their own, and
`MaskMod`, which needs tensors, is in `masks/mask_mod.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ds_ring.checked_numbers import true_or_false, whole_number
from ds_ring.errors import RingPatternError
from ds_ring.masks.mask_rule import PairMask, meet, one_class
from ds_ring.masks.tiles import UNBOUNDED, Kind, Tiles
from ds_ring.masks.triangulation import cut_by_distance

IntArray = np.ndarray
MASK_BLOCK = 256  # side of the blocks inside which a mask function is evaluated, tokens


@dataclass(frozen=True)
class Pattern:
    """Base of all patterns; instances are frozen values and hash by their contents. Compose with `&`.

    A pattern is the intersection of a band of distances and of a refinement of rectangles, so that every
    composition stays one table of tiles.
    """

    @property
    def distance(self) -> tuple[int, int]:
        """Least and most of (query position - key position) that may attend; +-UNBOUNDED where open."""
        return -UNBOUNDED, UNBOUNDED

    @property
    def is_causal(self) -> bool:
        """True if no query sees a key after itself."""
        return self.distance[0] >= 0

    @property
    def masks(self) -> tuple[PairMask, ...]:
        """Functions of single pairs, which only a kernel can evaluate."""
        return ()

    @property
    def known_tokens(self) -> tuple[int, ...]:
        """The lengths of sequence that it was made from; empty where it goes with any."""
        return ()

    def refine(self, tiles: Tiles) -> Tiles:
        """What is left of (FULL) rectangles, the band of distances not yet cut."""
        return tiles

    def labels(self, positions: IntArray) -> IntArray:
        """The classes that attend to one another; see masks/mask_rule.py, [Note: bands and labels]."""
        return one_class(positions)

    def stretch(self, start: int, length: int) -> tuple[Any, ...] | None:
        """What attention among positions start .. start + length - 1 owes to where they begin.

        Two stretches of one length with equal values are attended alike, position by position; None: nobody
        knows. It saves making the same tiles again and again.
        """
        return None

    def bind(self, heads: tuple[int, ...], query_heads: int, kv_heads: int) -> Pattern:
        """The pattern of the query heads that share one K/V head; equal patterns mean equal needs."""
        return self

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

    def multiplicity(self, head: int, query_heads: int, kv_heads: int, q: Any, k: Any) -> Any:
        """How often query position q attends to key position k (0: not); int arrays, broadcast."""
        least, most = self.distance
        gap = q - k
        return ((gap >= least) & (gap <= most)).astype(np.int64)

    def tiles(self, q_runs: IntArray, k_runs: IntArray) -> Tiles:
        """The non-empty tiles between two shards given by their runs (start, step, length), slot order."""
        return self.cut(Tiles.rectangles(q_runs, k_runs))

    def cut(self, rectangles: Tiles) -> Tiles:
        """The non-empty tiles of some rectangles."""
        near = replace(_may_touch(rectangles, *self.distance), rule=self)
        if not self.masks:
            return cut_by_distance(self.refine(near), *self.distance)
        blocks = self.refine(near).in_blocks(MASK_BLOCK).of_kind(Kind.PARTIAL)
        return replace(_may_touch(blocks, *self.distance), mask=MaskInside(self.masks, self.distance))

    def mask(
        self,
        q_positions: IntArray,
        k_positions: IntArray,
        head: int = 0,
        query_heads: int = 1,
        kv_heads: int = 1,
    ) -> np.ndarray:
        """The dense boolean mask of two lists of positions, bool [len(q), len(k)]; -1 attends to nothing."""
        q, k = q_positions[:, None], k_positions[None, :]
        return (self.multiplicity(head, query_heads, kv_heads, q, k) > 0) & (q >= 0) & (k >= 0)

    def __and__(self, other: Pattern) -> Pattern:
        """Attend where both do."""
        if not isinstance(other, Pattern):
            raise RingPatternError(f"&: expected a pattern on both sides, got {type(other).__name__}")
        return Both(self, other)


def _may_touch(tiles: Tiles, least: int, most: int) -> Tiles:
    """Drop rectangles that lie outside the band as a whole, before they are refined."""
    farthest = tiles.q.last_position - tiles.k.position
    nearest = tiles.q.position - tiles.k.last_position
    keep = (farthest >= least) & (nearest <= most)
    return tiles if keep.all() else tiles.rows(keep)


@dataclass(frozen=True)
class MaskInside:
    """The mask of PARTIAL tiles: masks of single pairs, within a band of distances."""

    masks: tuple[PairMask, ...]
    distance: tuple[int, int]

    def __call__(self, samples: int, q: Any, k: Any) -> Any:
        """Bool [len(q), len(k)], with batch and heads before it where they differ; see `PairMask`.

        Args:
            samples: size of the batch.
            q, k: int64 tensors of one dimension, positions.
        """
        least, most = self.distance
        gap = q[:, None] - k[None, :]
        visible = (gap >= least) & (gap <= most)
        for mask in self.masks:
            visible = visible & mask(samples, q, k)
        return visible


@dataclass(frozen=True)
class Full(Pattern):
    """Every query attends to every key."""

    def stretch(self, start: int, length: int) -> tuple[Any, ...] | None:
        return ()


@dataclass(frozen=True)
class Causal(Pattern):
    """A query attends to itself and to what came before."""

    @property
    def distance(self) -> tuple[int, int]:
        return 0, UNBOUNDED

    def stretch(self, start: int, length: int) -> tuple[Any, ...] | None:
        return ()


@dataclass(frozen=True)
class SlidingWindow(Pattern):
    """A query attends to the `window` positions that end with itself (Beltagy et al. 2020, Longformer).

    Attributes:
        window: number of positions seen, itself included, as in Mistral and FlashAttention's
            window_size = (window - 1, 0).
        causal: False sees window - 1 positions on either side as well.

    Raises:
        RingPatternError: the window is not a positive integer.
    """

    window: int
    causal: bool = True

    def __post_init__(self) -> None:
        window = whole_number(self.window, "SlidingWindow: window", RingPatternError)
        object.__setattr__(self, "window", window)
        true_or_false(self.causal, "SlidingWindow: causal", RingPatternError)

    @property
    def distance(self) -> tuple[int, int]:
        return (0 if self.causal else 1 - self.window), self.window - 1

    def stretch(self, start: int, length: int) -> tuple[Any, ...] | None:
        return ()


@dataclass(frozen=True)
class Both(Pattern):
    """Two patterns at once: `a & b`."""

    first: Pattern
    second: Pattern

    @property
    def distance(self) -> tuple[int, int]:
        (least, most), (other_least, other_most) = self.first.distance, self.second.distance
        return max(least, other_least), min(most, other_most)

    @property
    def is_causal(self) -> bool:
        return self.first.is_causal or self.second.is_causal

    @property
    def masks(self) -> tuple[PairMask, ...]:
        return self.first.masks + self.second.masks

    @property
    def known_tokens(self) -> tuple[int, ...]:
        return self.first.known_tokens + self.second.known_tokens

    def refine(self, tiles: Tiles) -> Tiles:
        return self.second.refine(self.first.refine(tiles))

    def stretch(self, start: int, length: int) -> tuple[Any, ...] | None:
        first, second = self.first.stretch(start, length), self.second.stretch(start, length)
        return None if first is None or second is None else (first, second)

    def labels(self, positions: IntArray) -> IntArray:
        return meet(self.first.labels(positions), self.second.labels(positions))

    def bind(self, heads: tuple[int, ...], query_heads: int, kv_heads: int) -> Pattern:
        return Both(*(part.bind(heads, query_heads, kv_heads) for part in (self.first, self.second)))

    def check(self, tokens: int, samples: int, query_heads: int, device: str) -> None:
        for part in (self.first, self.second):
            part.check(tokens, samples, query_heads, device)

    def multiplicity(self, head: int, query_heads: int, kv_heads: int, q: Any, k: Any) -> Any:
        first, second = (p.multiplicity(head, query_heads, kv_heads, q, k) for p in (self.first, self.second))
        return first * second

    def __str__(self) -> str:
        return f"{self.first} & {self.second}"
