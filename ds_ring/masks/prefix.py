"""A prefix that sees itself both ways, with causal attention behind it (PrefixLM, as in T5 and PaliGemma)."""

from __future__ import annotations

from dataclasses import dataclass

from ds_ring.masks.branches import Branch
from ds_ring.masks.partitions import in_range
from ds_ring.masks.pattern import Head, Pattern, check_numbers
from ds_ring.registry import JsonKey


@dataclass(frozen=True)
class PrefixLM(Pattern):
    """Attend to the query itself, to what came before, and within the first `prefix` tokens both ways.

    Attributes:
        prefix: number of tokens that see one another.

    Raises:
        RingPatternError: the prefix is not a positive integer.
    """

    json_key = JsonKey(
        "prefix",
        "the first n tokens see one another both ways; all others are causal",
        {
            "causal": "hides no later token",
            "window": "hides later tokens all the same",
            "chunk": "hides later tokens all the same",
            "segment_lengths": "hides later tokens all the same",
        },
    )
    prefix: int

    def __post_init__(self) -> None:
        check_numbers(self, "prefix")

    def branches(self, head: Head) -> tuple[Branch, ...]:
        # the second branch has only keys after their query, so no pair is in both
        prefix = in_range(0, self.prefix)
        return Branch(least=0), Branch(prefix, prefix, most=-1)
