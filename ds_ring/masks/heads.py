"""Some of a model's heads: Ulysses gives a rank a part of them, and what a head sees goes by its number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ds_ring.masks.pattern import Pattern
from ds_ring.masks.tiles import Tiles


@dataclass(frozen=True)
class HeadsOfPart(Pattern):
    """The pattern of the heads that a Ulysses rank has, numbered from 0 there.

    Attributes:
        whole: the pattern of all heads.
        part: which of `parts` equal, consecutive parts of the heads these are.
    """

    whole: Pattern
    part: int
    parts: int

    @property
    def distance(self) -> tuple[int, int]:
        return self.whole.distance

    def refine(self, tiles: Tiles) -> Tiles:
        return self.whole.refine(tiles)

    def bind(self, heads: tuple[int, ...], query_heads: int, kv_heads: int) -> Pattern:
        numbers = tuple(self.part * query_heads + head for head in heads)
        return self.whole.bind(numbers, self.parts * query_heads, self.parts * kv_heads)

    def check(self, tokens: int, samples: int, query_heads: int, device: str) -> None:
        self.whole.check(tokens, samples, query_heads, device)

    def multiplicity(self, head: int, query_heads: int, kv_heads: int, q: Any, k: Any) -> Any:
        number = self.part * query_heads + head
        return self.whole.multiplicity(number, self.parts * query_heads, self.parts * kv_heads, q, k)

    def __str__(self) -> str:
        return f"{self.whole} (part {self.part} of {self.parts} of the heads)"
