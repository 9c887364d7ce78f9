"""Masks of single pairs: tiles refer to them, kernels evaluate them. `patterns/captured` makes them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ds_ring.masks.slots import IntArray

MaskFunction = Callable[[Any, Any, Any, Any], Any]  # FlexAttention's mask_mod(batch, head, q_pos, k_pos)


ScoreFunction = Callable[[Any, Any, Any, Any, Any], Any]  # its score_mod(score, batch, head, q_pos, k_pos)


class ByIdentity:
    """Hold an object, a function of pairs for example, that is equal to itself alone."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, operand: object) -> bool:
        return isinstance(operand, ByIdentity) and operand.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


class PairMask(ABC):
    """A mask function of single pairs for some query heads: a frozen value, equal if what it computes is."""

    heads: tuple[int, ...]  # their numbers; empty if it does not depend on the head

    @property
    @abstractmethod
    def identity(self) -> int:
        """Return which object the function is."""

    @property
    @abstractmethod
    def captured_bytes(self) -> int:
        """Return the memory of the tensors that the function captured."""

    @property
    @abstractmethod
    def is_known_causal(self) -> bool:
        """Return whether no query attends to a key after itself."""

    @abstractmethod
    def for_heads(self, heads: tuple[int, ...]) -> PairMask:
        """Return the mask for other heads; for none in particular if it does not depend on the head."""

    @abstractmethod
    def __call__(self, samples: int, q: Any, k: Any) -> Any:
        """Return the mask of positions int64 [n] and [m], bool [n, m]; batch and head lead if they matter."""

    @abstractmethod
    def function(self, device: Any) -> MaskFunction:
        """Return it as a mask_mod of FlexAttention, on a device."""

    @abstractmethod
    def pairs(self, q: IntArray, k: IntArray) -> IntArray:
        """Return bool of pairs of positions for the first head; refuse a mask that differs by sample."""

    @abstractmethod
    def check(self, tokens: int, samples: int, query_heads: int, device: str) -> None:
        """Try the function at some positions; see `Pattern.check`."""

    @abstractmethod
    def check_unchanged(self) -> None:
        """Refuse a mask whose function has captured other values since it was made."""


@dataclass(frozen=True)
class MaskInside:
    """The mask inside a tile: mask functions of single pairs, within a band of distances."""

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
