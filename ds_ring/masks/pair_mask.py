"""Masks of single pairs: what only tensors can evaluate, and how kernels ask for it. Knows no tensor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from ds_ring.masks.slot_ranges import IntArray

MaskFunction = Callable[[Any, Any, Any, Any], Any]  # FlexAttention's mask_mod(batch, head, q_pos, k_pos)


class PairMask(Protocol):
    """Decide single pairs, for some heads; hashable. `masks/mask_mod.py` has the one there is.

    Attributes:
        function: of one batch number, head number, query position and key position.
        heads: numbers of the query heads for which it is asked; empty where all are alike.
        is_causal: it is known that it shows no key after its query.
    """

    @property
    def function(self) -> MaskFunction: ...

    @property
    def heads(self) -> tuple[int, ...]: ...

    @property
    def is_causal(self) -> bool: ...

    def for_heads(self, heads: tuple[int, ...]) -> PairMask:
        """Return the same predicate for other heads; for all heads at once where they are alike."""
        ...

    def check(self, tokens: int, samples: int, query_heads: int, device: str) -> None:
        """Refuse a predicate that cannot be evaluated for such a call; see `Pattern.check`."""
        ...

    def pairs(self, q: IntArray, k: IntArray) -> IntArray:
        """Return bool of the pairs of two numpy arrays of equal shape, for the first of its heads."""
        ...

    def __call__(self, samples: int, q: Any, k: Any) -> Any:
        """Return bool [len(q), len(k)] of positions; batch and heads come before where they differ.

        Args:
            samples: size of the batch.
            q, k: int64 tensors of one dimension.
        """
        ...


@dataclass(frozen=True)
class MaskInside:
    """Evaluate the mask of PARTIAL tiles: predicates of single pairs, within a band of distances."""

    masks: tuple[PairMask, ...]
    least: int
    most: int

    def __call__(self, samples: int, q: Any, k: Any) -> Any:
        """Return bool [len(q), len(k)], with batch and heads before it where they differ; see `PairMask`."""
        gap = q[:, None] - k[None, :]
        visible = (gap >= self.least) & (gap <= self.most)
        for mask in self.masks:
            visible = visible & mask(samples, q, k)
        return visible
