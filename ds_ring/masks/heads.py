"""Some of a model's heads: Ulysses gives a rank a part of them, and what a head sees goes by its number.

[Note: numbers of heads]
The offsets of a dilated pattern depend on the number of a query head among all heads of the model. A Ulysses
rank, which has a part of the heads, uses the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

from ds_ring.masks.branches import Branch
from ds_ring.masks.pattern import Head, Pattern


@dataclass(frozen=True)
class HeadsOfPart(Pattern):
    """Describe the pattern of the heads that a Ulysses rank has, numbered from 0 there.

    Attributes:
        whole: the pattern of all heads.
        part: which of `parts` equal, consecutive parts of the heads these are.
    """

    whole: Pattern
    part: int
    parts: int

    def branches(self, head: Head) -> tuple[Branch, ...]:
        number = self.part * head.query_heads + head.number
        return self.whole.branches(Head(number, self.parts * head.query_heads, self.parts * head.kv_heads))

    def __str__(self) -> str:
        return f"{self.whole} (part {self.part} of {self.parts} of the heads)"
