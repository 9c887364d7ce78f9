"""Keep the keys and values of a generation where they are: spread over the ranks of a ring.

Owns the cache that `generate` gets in place of transformers' `DynamicCache`, and the sharding with which
attention reads it. When it is filled and by what is generation.py's.

Shapes: B samples, G key/value heads, S slots of this rank, Q new tokens, D head dim.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any, NoReturn

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from ds_ring.errors import RingConfigError
from ds_ring.integrations.deepspeed.batch_sharding import BatchSharding, RowsAttention
from ds_ring.integrations.deepspeed.packing import RowGroup
from ds_ring.masks.pattern import Pattern
from ds_ring.masks.score_mod import ScoreFunction
from ds_ring.module import RingAttention
from ds_ring.runtime.autograd import replicated_attention_op
from ds_ring.schedule.cache_layout import CacheLayout
from ds_ring.schedule.layout import Layout

_RESERVED = 64  # slots a rank reserves at once for tokens that are generated


class RingCache(Cache):
    """Hold this rank's part of every layer's keys and values.

    A prompt stays where its ring pass had it; each token after it is kept by one rank, in turn. So a rank
    holds 1/P of what `DynamicCache` would, and up to 64 slots a layer more.
    """

    def __init__(self, ring_rank: int, ring_size: int) -> None:
        kind: Any = functools.partial(RingCacheLayer, self)
        super().__init__(layer_class_to_replicate=kind)
        self.ring_rank, self.ring_size = ring_rank, ring_size
        self.layout: CacheLayout | None = None  # of all reserved slots; None before the prompt
        self.real_BT: Tensor | None = None  # which tokens are no padding, on the CPU; None if all are
        self.groups: dict[int, tuple[RowGroup, ...]] = {}  # rows by their padding, by the length of a layout
        self._tokens = self._arriving = 0

    def begin(self, tokens: int, prompt: Layout | None = None) -> None:
        """Say how many tokens every layer is about to store; the prompt's come with their layout."""
        self._arriving = tokens
        prompt = prompt or (self.layout.prompt if self.layout is not None else None)
        assert prompt is not None, "the first tokens of a cache are a prompt"
        needed = self._tokens + tokens
        if self.layout is None or needed > self.layout.tokens:
            reserved = needed + _RESERVED * self.ring_size
            self.layout = CacheLayout(reserved, self.ring_size, prompt=prompt)

    def finish(self) -> None:
        """Count what every layer has stored."""
        self._tokens += self._arriving
        self._arriving = 0

    @property
    def arriving(self) -> range:
        """Return the positions of the tokens that are being stored."""
        return range(self._tokens, self._tokens + self._arriving)

    @property
    def nbytes(self) -> int:
        """Return the memory of this rank's part, bytes."""
        layers: list[Any] = self.layers
        return sum(int(layer.keys.nbytes + layer.values.nbytes) for layer in layers)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._tokens

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self._tokens + query_length, 0

    def reset(self) -> None:
        self.layers.clear()
        self.groups.clear()
        self.layout = self.real_BT = None
        self._tokens = self._arriving = 0

    def crop(self, tokens_to_remove: int) -> NoReturn:
        """Refuse to forget tokens."""
        raise RingConfigError(
            "generate: expected a way of decoding that keeps all tokens, got one that takes"
            f" {tokens_to_remove} back; decode greedily, by sampling or with beams"
        )


class RingCacheLayer(CacheLayerMixin):
    """Hold this rank's part of one layer's keys and values, [B, G, S, D]."""

    def __init__(self, cache: RingCache) -> None:
        super().__init__()
        self._cache = cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Reserve this layer's slots, for tensors like these."""
        self.keys, self.values = self._room(key_states), self._room(value_states)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store keys and values [B, G, Q, D]; return what attention reads.

        Of a prompt that is this rank's shard, for the ring pass. Later every rank has all new tokens, and
        gets back what it holds of the whole sequence.
        """
        cache = self._cache
        assert cache.layout is not None
        if cache.arriving.start == 0:
            self.lazy_initialization(key_states, value_states)
            stored = cache.layout.prompt.valid_tokens(cache.ring_rank)
            for held, new in ((self.keys, key_states), (self.values, value_states)):
                assert held is not None
                held[:, :, :stored] = new[:, :, :stored]
            return key_states, value_states
        assert self.keys is not None and self.values is not None
        if self.keys.shape[2] < cache.layout.local_tokens:
            self.keys, self.values = self._room(self.keys, self.keys), self._room(self.values, self.values)
        for index, position in enumerate(cache.arriving):
            slot = cache.layout.slot(cache.ring_rank, position)
            if slot is not None:
                self.keys[:, :, slot] = key_states[:, :, index]
                self.values[:, :, slot] = value_states[:, :, index]
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cache.get_mask_sizes(query_length, 0)

    def get_seq_length(self) -> int:
        return self._cache.get_seq_length()

    def get_max_length(self) -> int:
        return -1  # transformers' word for none

    def _room(self, like: Tensor, kept: Tensor | None = None) -> Tensor:
        """Return zeros [B, G, S, D] for all reserved slots; `kept` fills the first ones."""
        assert self._cache.layout is not None
        batch, heads, _, head_dim = like.shape
        room = like.new_zeros(batch, heads, self._cache.layout.local_tokens, head_dim)
        if kept is not None:
            room[:, :, : kept.shape[2]] = kept
        return room


@dataclass(frozen=True, eq=False)
class CachedSharding(BatchSharding):
    """Hold where the tokens of a cache lie, and where those stand that ask: every rank has all of these."""

    q_positions: Tensor = field(kw_only=True)  # int64 [Q], on the CPU

    def attention(
        self,
        scale: float | None = None,
        pattern: Pattern | None = None,
        score_mod: ScoreFunction | None = None,
    ) -> RowsAttention:
        asked = self.patterns.pattern if pattern is None else pattern
        parts: list[RingAttention] = []
        for one in [asked & group.documents for group in self.groups] or [asked]:
            part = _CachedAttention(
                self.config, mesh=self.mesh, layout=self.layout, scale=scale, pattern=one, score_mod=score_mod
            )
            part.q_positions = self.q_positions
            parts.append(part)
        return RowsAttention(parts, tuple(group.rows for group in self.groups))


class _CachedAttention(RingAttention):
    """Attend few queries, which every rank has, to what all ranks hold."""

    q_positions: Tensor

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *args: Any,
        sinks: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        assert not args and not kwargs
        handle = self.context.handle
        out: Tensor = replicated_attention_op(query, key, value, self.q_positions, handle, sinks)[0]
        return out
