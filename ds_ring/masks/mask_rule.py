"""What tiles were cut from, as a function of single tokens: for kernels that evaluate a mask pair by pair.

[Note: bands and labels]
Every pattern is a band of distances and a number of branches, each of which puts tokens into classes and
lets those of one class attend to one another: documents have one branch (the class is the document), a
dilated pattern one for each segment length (the class is the segment, tokens off the offset have none).
So a pair's m is the number of branches in which both tokens have the same label, if the band holds their
distance. A token's labels are integers, one for each branch, and a kernel needs nothing else of the pattern.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from ds_ring.masks.slot_ranges import IntArray

NO_CLASS = -1  # the label of a token that a branch does not hold
MaskFunction = Callable[[Any, Any, Any, Any], Any]  # FlexAttention's mask_mod(batch, head, q_pos, k_pos)


class PairMask(Protocol):
    """A function of single pairs, which only tensors can evaluate (`masks/mask_mod.py`).

    Attributes:
        function: of one batch number, head number, query position and key position.
        heads: numbers of the query heads for which it is asked; empty where all are alike.
    """

    @property
    def function(self) -> MaskFunction: ...

    @property
    def heads(self) -> tuple[int, ...]: ...

    def __call__(self, samples: int, q: Any, k: Any) -> Any:
        """Bool [len(q), len(k)] of positions q and k; with batch and heads before it where they differ.

        Args:
            samples: size of the batch.
            q, k: int64 tensors of one dimension.
        """
        ...


class Rule(Protocol):
    """m(q, k) = [least <= q - k <= most] * #{branches with label(q) == label(k) >= 0}, where `masks` show it.

    Attributes:
        distance: least and most of query position - key position.
        masks: functions of single pairs that must all be true.
    """

    @property
    def distance(self) -> tuple[int, int]: ...

    @property
    def masks(self) -> tuple[PairMask, ...]: ...

    def labels(self, positions: IntArray) -> IntArray:
        """Labels of tokens, int64 [members, branches, n]; one member where all heads of a group are alike.

        Labels compare within one call: queries and keys that are to meet are asked for together.
        """
        ...


def one_class(positions: IntArray) -> IntArray:
    """Labels of a pattern that tells no tokens apart."""
    return np.zeros((1, 1, len(positions)), dtype=np.int64)


def meet(first: IntArray, second: IntArray) -> IntArray:
    """Labels of two patterns at once: a branch for each two of theirs, a class for each two classes."""
    first, second = first[:, :, None], second[:, None]
    base = int(second.max(initial=0)) + 1
    both = np.where((first >= 0) & (second >= 0), first * base + second, NO_CLASS)
    both = both.reshape(both.shape[0], -1, both.shape[-1])
    if both.max(initial=0) >= 1 << 31:  # so that three and more patterns never overflow
        numbers = np.unique(both, return_inverse=True)[1].reshape(both.shape)
        both = np.where(both < 0, NO_CLASS, numbers)
    return both
