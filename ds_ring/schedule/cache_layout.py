"""Lay out a cache of keys and values: a prompt as a ring pass left it, and what was generated after it.

Owns that arithmetic; `integrations/transformers/ring_cache.py` holds the tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ds_ring.schedule.layout import IntArray, Layout


@dataclass(frozen=True)
class CacheLayout(Layout):
    """Put a prompt where `prompt` has it, and token i after it on rank i mod P, behind that rank's part.

    `tokens` counts all slots that are reserved, used or not: queries say by their positions how far they see.

    Attributes:
        prompt: where the first tokens lie.
    """

    prompt: Layout = field(kw_only=True)

    @property
    def name(self) -> str:
        return "cache"

    def runs(self, ring_rank: int) -> IntArray:
        first = self.prompt.tokens + ring_rank
        generated = len(range(first, self.tokens, self.ring_size))
        own = np.array([(first, self.ring_size, generated)] if generated else [], dtype=np.int64)
        return np.concatenate([self.prompt.runs(ring_rank), own.reshape(-1, 3)])

    @property
    def longest_shard(self) -> int:
        return max(self.valid_tokens(rank) for rank in range(self.ring_size))

    def slot(self, ring_rank: int, position: int) -> int | None:
        """Return the slot of a generated token, None on the ranks that do not hold it."""
        turn, owner = divmod(position - self.prompt.tokens, self.ring_size)
        return self.prompt.valid_tokens(ring_rank) + turn if owner == ring_rank else None

    def __str__(self) -> str:
        return f"{super().__str__()}, {self.prompt}"
