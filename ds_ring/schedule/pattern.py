"""Patterns: which query position attends to which key position. Declarative, in global positions.

A pattern answers three questions and nothing else: the tiles of two shards (for the plan), the FlexAttention
`mask_mod` (for GPU kernels), and the plain boolean mask (for the reference). All three are tested against
each other. A pattern knows no layout, no rank and no tensor library.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ds_ring.errors import RingPatternError
from ds_ring.schedule.tiles import UNBOUNDED, Tiles, cut_by_distance

if TYPE_CHECKING:
    from ds_ring.config import RingConfig

IntArray = np.ndarray


@dataclass(frozen=True)
class Pattern(ABC):
    """Base of all patterns; instances are frozen values and hash by their contents."""

    @property
    @abstractmethod
    def distance(self) -> tuple[int, int]:
        """Least and most of (query position - key position) that may attend; +-UNBOUNDED where open."""

    @property
    def is_causal(self) -> bool:
        """True if no query sees a key after itself."""
        return self.distance[0] >= 0

    def tiles(self, q_runs: IntArray, k_runs: IntArray) -> Tiles:
        """The non-empty tiles between two shards given by their runs (start, step, length), slot order."""
        return cut_by_distance(Tiles.rectangles(q_runs, k_runs), *self.distance)

    def mask_mod(self, batch: Any, head: Any, q_position: Any, k_position: Any) -> Any:
        """FlexAttention's `mask_mod` in global positions; works on tensors, numpy arrays and ints."""
        least, most = self.distance
        gap = q_position - k_position
        return (gap >= least) & (gap <= most)

    def mask(self, q_positions: IntArray, k_positions: IntArray) -> np.ndarray:
        """The dense boolean mask of two lists of positions, bool [len(q), len(k)]; -1 attends to nothing."""
        q, k = q_positions[:, None], k_positions[None, :]
        return np.asarray(self.mask_mod(0, 0, q, k)) & (q >= 0) & (k >= 0)


@dataclass(frozen=True)
class Full(Pattern):
    """Every query attends to every key."""

    @property
    def distance(self) -> tuple[int, int]:
        return -UNBOUNDED, UNBOUNDED


@dataclass(frozen=True)
class Causal(Pattern):
    """A query attends to itself and to what came before."""

    @property
    def distance(self) -> tuple[int, int]:
        return 0, UNBOUNDED


def pattern_from_config(config: RingConfig) -> Pattern:
    """The pattern that the JSON's "pattern" section describes.

    Raises:
        RingPatternError: a pattern that this version has no tiles for yet.
    """
    section = config.pattern
    later = {
        "window": section.window,
        "segment_lengths": section.segment_lengths,
        "documents": section.documents or None,
    }
    asked = [name for name, value in later.items() if value is not None]
    if asked:
        raise RingPatternError(
            f'"pattern" asks for {", ".join(asked)}: not available in this version; expected only "causal".'
            " Remove it, or use a later version of ds_ring"
        )
    return Causal() if section.causal else Full()
