"""Attention within chunks of fixed length (Llama 4's local layers)."""

from __future__ import annotations

from dataclasses import dataclass

from ds_ring.checked_numbers import true_or_false
from ds_ring.errors import RingPatternError
from ds_ring.masks.branches import Branch, alike
from ds_ring.masks.partitions import Segment
from ds_ring.masks.pattern import Head, Pattern, check_numbers
from ds_ring.masks.tiles import UNBOUNDED
from ds_ring.registry import JsonKey


@dataclass(frozen=True)
class Chunked(Pattern):
    """Attend to the query itself and to earlier keys in the query's own chunk of `chunk` tokens.

    Attributes:
        chunk: tokens of a chunk; the first begins at position 0.
        causal: False also attends to later keys of the chunk.

    Raises:
        RingPatternError: the chunk is not a positive integer.
    """

    json_key = JsonKey("chunk", "tokens see their own chunk of n tokens only, as in Llama 4")
    chunk: int
    causal: bool = True

    def __post_init__(self) -> None:
        check_numbers(self, "chunk")
        true_or_false(self.causal, "Chunked: causal", RingPatternError)

    def branches(self, head: Head) -> tuple[Branch, ...]:
        return (alike(Segment(self.chunk), least=0 if self.causal else -UNBOUNDED),)
