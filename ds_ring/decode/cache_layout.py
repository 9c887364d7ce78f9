"""The layout of a K/V cache that grows token by token."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ds_ring.masks.slots import IntArray
from ds_ring.schedule.layout import Layout


@dataclass(frozen=True)
class CacheLayout(Layout):
    """The layout of a K/V cache: the prompt in the layout of its ring pass, then generated tokens.

    Token i after the prompt is on rank i mod P, after that rank's shard of the prompt.

    `tokens` counts all reserved slots, used or not: the positions of queries limit the keys that they see.
    """

    prompt: Layout = field(kw_only=True)

    name = "cache"

    def runs(self, ring_rank: int) -> IntArray:
        first = self.prompt.tokens + ring_rank
        generated = len(range(first, self.tokens, self.ring_size))
        own = np.array([[first, self.ring_size, generated]])[: min(generated, 1)]
        return np.concatenate([self.prompt.runs(ring_rank), own])

    def slot(self, ring_rank: int, position: int) -> int | None:
        """Return the slot of a generated token, None on the ranks that do not hold it."""
        turn, owner = divmod(position - self.prompt.tokens, self.ring_size)
        return self.prompt.valid_tokens(ring_rank) + turn if owner == ring_rank else None

    def __str__(self) -> str:
        return f"{super().__str__()}, {self.prompt}"
