"""The layout of a K/V cache that grows token by token."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from ds_ring.masks.slots import IntArray
from ds_ring.schedule.layout import Layout


@dataclass(frozen=True)
class CacheLayout(Layout):
    """The layout of a K/V cache: the prompt in the layout of its ring pass, then generated tokens.

    They go to each rank in turn, `block` positions at a time, after that rank's shard of the prompt. A block
    that the prompt has begun stays on the rank of its last token.

    `tokens` counts all reserved slots, used or not: the positions of queries limit the keys that they see.
    """

    prompt: Layout = field(kw_only=True)
    block: int = field(default=1, kw_only=True)

    name = "cache"

    @cached_property
    def _begun(self) -> tuple[int, int]:
        """Return where whole blocks begin, and the owner of what is between there and the prompt."""
        owner = int(self.prompt.slots_by_position()[-1]) // self.prompt.local_tokens
        return min(-(-self.prompt.tokens // self.block) * self.block, self.tokens), owner

    def _generated(self, ring_rank: int) -> IntArray:
        """Return the runs of a rank's generated tokens."""
        first, owner = self._begun
        begun = [[self.prompt.tokens, 1, first - self.prompt.tokens]] if owner == ring_rank else []
        if self.block == 1:
            first, step = first + ring_rank, self.ring_size
            blocks = [[first, step, len(range(first, self.tokens, step))]]
        else:
            starts = range(first + ring_rank * self.block, self.tokens, self.ring_size * self.block)
            blocks = [[start, 1, min(self.block, self.tokens - start)] for start in starts]
        runs = np.array([*begun, *blocks], dtype=np.int64).reshape(-1, 3)
        return runs[runs[:, 2] > 0]

    def runs(self, ring_rank: int) -> IntArray:
        return np.concatenate([self.prompt.runs(ring_rank), self._generated(ring_rank)])

    def slot(self, ring_rank: int, position: int) -> int | None:
        """Return the slot of a generated token, None on the ranks that do not hold it."""
        slot = self.prompt.valid_tokens(ring_rank)
        for start, step, length in self._generated(ring_rank).tolist():
            turn, rest = divmod(position - start, step)
            if 0 <= turn < length and not rest:
                return slot + int(turn)
            slot += length
        return None

    def __str__(self) -> str:
        return f"{super().__str__()}, {self.prompt}"
