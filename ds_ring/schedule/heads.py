"""Some of a model's heads: Ulysses gives a rank a part of them, a walk takes a group of them around the ring.

What a head sees goes by its number among all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ds_ring.schedule.pattern import Pattern
from ds_ring.schedule.tiles import Tiles


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

    def multiplicity(self, head: int, query_heads: int, kv_heads: int, q: Any, k: Any) -> Any:
        number = self.part * query_heads + head
        return self.whole.multiplicity(number, self.parts * query_heads, self.parts * kv_heads, q, k)

    def __str__(self) -> str:
        return f"{self.whole} (part {self.part} of {self.parts} of the heads)"


def head_chunks(kv_heads: slice, head_bytes: int, chunk_bytes: int) -> list[slice]:
    """K/V heads of a slice in equal groups of at least `chunk_bytes`.

    Each group goes round by itself, [Note: heads in groups] in `runtime/ring_pass.py`; heads of 0 bytes
    (nothing is sent) are one group.
    """
    step = kv_heads.step or 1
    heads = range(kv_heads.start, kv_heads.stop, step)
    sizes = [n for n in range(1, len(heads) + 1) if len(heads) % n == 0]
    size = next((n for n in sizes if n * head_bytes >= chunk_bytes), len(heads))  # all: nothing to send
    groups = (heads[first : first + size] for first in range(0, len(heads), size))
    return [slice(group[0], group[-1] + 1, step) for group in groups]
