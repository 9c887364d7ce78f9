"""Attention sinks: the first tokens, seen by all (Xiao et al. 2023, StreamingLLM)."""

from __future__ import annotations

from dataclasses import dataclass

from ds_ring.checked_numbers import true_or_false
from ds_ring.errors import RingPatternError
from ds_ring.masks.branches import Branch
from ds_ring.masks.partitions import ALL, in_range
from ds_ring.masks.pattern import Head, Pattern, check_numbers
from ds_ring.masks.tiles import UNBOUNDED


@dataclass(frozen=True)
class Sinks(Pattern):
    """Attend to the first `sinks` tokens; meant for `SlidingWindow(w) | Sinks(n)`.

    Attributes:
        sinks: number of tokens that all see.
        causal: a query among them sees none after itself.

    Raises:
        RingPatternError: the number of sinks is not a positive integer.
    """

    sinks: int
    causal: bool = True

    def __post_init__(self) -> None:
        check_numbers(self, "sinks")
        true_or_false(self.causal, "Sinks: causal", RingPatternError)

    def branches(self, head: Head) -> tuple[Branch, ...]:
        return (Branch(ALL, in_range(0, self.sinks), least=0 if self.causal else -UNBOUNDED),)
