"""Sliding windows: over the nearest tokens, and over every n-th of them."""

from __future__ import annotations

from dataclasses import dataclass

from ds_ring.checked_numbers import true_or_false
from ds_ring.errors import RingPatternError
from ds_ring.masks.branches import Branch, alike
from ds_ring.masks.partitions import Remainder
from ds_ring.masks.pattern import Head, Pattern, check_numbers


@dataclass(frozen=True)
class SlidingWindow(Pattern):
    """Attend to the `window` positions that end with the query itself (Beltagy et al. 2020, Longformer).

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
        check_numbers(self, "window")
        true_or_false(self.causal, "SlidingWindow: causal", RingPatternError)

    def branches(self, head: Head) -> tuple[Branch, ...]:
        return (Branch(least=0 if self.causal else 1 - self.window, most=self.window - 1),)


@dataclass(frozen=True)
class DilatedWindow(Pattern):
    """Attend to `window` positions `rate` apart that end with the query itself (Longformer's dilated window).

    Attributes:
        window: number of positions seen, itself included; they reach back (window - 1) x rate tokens.
        rate: distance of one position seen to the next; 1 is `SlidingWindow`.
        causal: False sees window - 1 positions on either side as well.

    Raises:
        RingPatternError: a number that is not a positive integer.
    """

    window: int
    rate: int
    causal: bool = True

    def __post_init__(self) -> None:
        check_numbers(self, "window", "rate")
        true_or_false(self.causal, "DilatedWindow: causal", RingPatternError)

    def branches(self, head: Head) -> tuple[Branch, ...]:
        reach = (self.window - 1) * self.rate
        # the remainder picks every `rate`-th position, the band how many of them
        return (alike(Remainder(self.rate), least=0 if self.causal else -reach, most=reach),)


def applies_window(pattern: Pattern, least: int, most: int) -> bool:
    """Return whether a sliding window with these bounds is all that limits how far a pattern sees.

    Args:
        pattern: alone or put together with `&`.
        least, most: of query position - key position.
    """
    windowed = any(isinstance(part, SlidingWindow) for part in pattern.conjuncts)
    return windowed and pattern.distance == (least, most)
