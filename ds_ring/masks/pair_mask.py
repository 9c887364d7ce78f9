"""Masks of single pairs, which only tensors can evaluate, and how kernels call them. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from ds_ring.masks.slot_ranges import IntArray

MaskFunction = Callable[[Any, Any, Any, Any], Any]  # FlexAttention's mask_mod(batch, head, q_pos, k_pos)


class PairMask(Protocol):
    """A mask function of single pairs for some heads; hashable. `masks/mask_mod.py` has the implementation.

    Attributes:
        function: of one batch index, head index, query position and key position.
        heads: indices of the query heads to evaluate; empty if the mask does not depend on the head.
        is_causal: True if the function is known to mask every key after its query.
    """

    @property
    def function(self) -> MaskFunction: ...

    @property
    def heads(self) -> tuple[int, ...]: ...

    @property
    def is_causal(self) -> bool: ...

    def for_heads(self, heads: tuple[int, ...]) -> PairMask:
        """Return the same mask for other heads; unchanged if it does not depend on the head."""
        ...

    def check(self, tokens: int, samples: int, query_heads: int, device: str) -> None:
        """Raise if the mask cannot be evaluated for such a call; see `Pattern.check`."""
        ...

    def pairs(self, q: IntArray, k: IntArray) -> IntArray:
        """Return bool for pairs, two numpy arrays of equal shape, for the first of its heads."""
        ...

    def __call__(self, samples: int, q: Any, k: Any) -> Any:
        """Return the mask, bool [len(q), len(k)], with leading batch and head dimensions if they matter.

        Args:
            samples: batch size.
            q, k: positions, int64 tensors with one dimension.
        """
        ...


@dataclass(frozen=True)
class MaskInside:
    """The mask of PARTIAL tiles: mask functions of single pairs, within a band of distances."""

    masks: tuple[PairMask, ...]
    least: int
    most: int

    def __call__(self, samples: int, q: Any, k: Any) -> Any:
        """Return bool [len(q), len(k)], with leading batch and head dimensions if they matter."""
        gap = q[:, None] - k[None, :]
        visible = (gap >= self.least) & (gap <= self.most)
        for mask in self.masks:
            visible = visible & mask(samples, q, k)
        return visible
