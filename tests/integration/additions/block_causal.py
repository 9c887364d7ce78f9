"""Causal attention between blocks, both ways inside a block (block diffusion)."""

from __future__ import annotations

from dataclasses import dataclass

from ds_ring.masks.branches import Branch, Segment, match_labels
from ds_ring.masks.pattern import Pattern, QueryHead, check_numbers
from ds_ring.plugin import JsonKey, Plugin


@dataclass(frozen=True)
class BlockCausal(Pattern):
    """Attend to all tokens before the query, and to all of its own block of `block` tokens."""

    json_key = JsonKey(
        "block", "n tokens see one another both ways, and what came before", {"causal": "hides nothing"}
    )
    block: int

    def __post_init__(self) -> None:
        check_numbers(self, "block")

    def branches(self, head: QueryHead) -> tuple[Branch, ...]:
        return Branch(least=0), match_labels(Segment(self.block), most=-1)


PLUGIN = Plugin(patterns={"BlockCausal": BlockCausal})
