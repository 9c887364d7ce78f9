"""The cache of a generation: each rank's part of the keys and values, and the states that every rank has.

Keys and values stay on the rank that computed them, so a rank holds 1/P of them. The states of recurrent
layers and the last inputs of short convolutions do not grow with the sequence: after the prompt every rank
gets those of its last token, and updates them with each later token as one process does.

Shapes: B samples, T tokens so far, Q new tokens, G key/value heads, S slots, D head dim, C channels.
"""

from __future__ import annotations

import functools
from typing import Any, NoReturn

from torch import Tensor
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from ds_ring.comm.exchange import Exchange
from ds_ring.compat.transformers import NO_CACHE_LAYER, PreTrainedConfig
from ds_ring.data.packing import RowGroup
from ds_ring.decode.cache_layout import CacheLayout
from ds_ring.errors import RingConfigError
from ds_ring.models.rows import get_local_last_tokens
from ds_ring.schedule.layout import Layout

_RESERVED = 64  # slots a rank reserves at once for tokens that are generated


class RingCache(Cache):
    """Hold this rank's part of every layer's keys and values, and the states of recurrent layers.

    A prompt stays where its ring pass had it; each token (or block) after it is kept by one rank, in
    turn. So a rank holds 1/P of what `DynamicCache` would, and up to 64 slots a layer more.

    Args:
        ring_rank, ring_size: this rank's place.
        config: of a model with recurrent layers: the cache then has the layers of `DynamicCache(config)`.
        exchange: of the ring, by which the ranks get states; None for one rank.
        block: consecutive tokens that stay on one rank.
    """

    def __init__(
        self,
        ring_rank: int,
        ring_size: int,
        config: PreTrainedConfig | None = None,
        exchange: Exchange | None = None,
        block: int = 1,
    ) -> None:
        self.ring_rank, self.ring_size, self.block = ring_rank, ring_size, block
        self.layout: CacheLayout | None = None  # of all reserved slots; None before the prompt
        self.real_BT: Tensor | None = None  # which tokens are no padding, on the CPU; None if all are
        self.groups: dict[int, tuple[RowGroup, ...]] = {}  # rows by their padding, by the length of a layout
        self.own: Any = None  # the states of a model that has a class of its own for them (RWKV, xLSTM)
        self._tokens = self._arriving = 0
        self._config, self._exchange = config, exchange
        if config is None:
            kind: Any = functools.partial(RingCacheLayer, self)
            super().__init__(layer_class_to_replicate=kind)
        else:
            super().__init__(layers=self._layers())

    def _layers(self) -> list[Any]:
        """Return this cache's layers in place of transformers' own; none yet if all hold keys and values."""
        layers: list[Any] = []
        model_layers: list[Any] = [] if self._config is None else DynamicCache(config=self._config).layers
        for layer in model_layers:
            if isinstance(layer, NO_CACHE_LAYER):
                layers.append(layer)
            elif not isinstance(layer, LinearAttentionCacheLayerMixin):
                layers.append(RingCacheLayer(self))
            else:
                is_hybrid = CacheLayerMixin in type(layer).__mro__
                kind = RingHybridLayer if is_hybrid else RingStateLayer
                layers.append(kind(self, layer.number_of_states))
        return layers

    def begin(self, tokens: int, prompt: Layout | None = None) -> None:
        """Say how many tokens every layer is about to store; the prompt's come with their layout."""
        self._arriving = tokens
        prompt = prompt or (self.layout.prompt if self.layout is not None else None)
        assert prompt is not None, "the first tokens of a cache are a prompt"
        needed = self._tokens + tokens
        if self.layout is None or needed > self.layout.tokens:
            reserved = needed + _RESERVED * self.ring_size
            reserved = -(-reserved // self.block) * self.block
            self.layout = CacheLayout(reserved, self.ring_size, prompt=prompt, block=self.block)

    def finish(self) -> None:
        """Count what every layer has stored."""
        self._tokens += self._arriving
        self._arriving = 0

    @property
    def arriving(self) -> range:
        """Return the positions of the tokens that are being stored."""
        return range(self._tokens, self._tokens + self._arriving)

    @property
    def is_compileable(self) -> bool:
        """Return False: the passes of a ring are no graph that transformers could compile."""
        return False

    def last_inputs(self, x_BCS: Tensor, width: int) -> Tensor:
        """Return the last inputs of the prompt [B, C, width] on every rank; zeros where there is no token.

        Collective in the ring.
        """
        assert self.layout is not None
        tail_BCW = get_local_last_tokens(x_BCS, width, self.layout.prompt, self.ring_rank)
        if self._exchange is not None and self._exchange.mesh.ring_group is not None:
            self._exchange.all_reduce(tail_BCW, self._exchange.mesh.ring_group)
        return tail_BCW

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        """Return the state of a layer, as MiniMax's own cache; None before the prompt."""
        layer: Any = self.layers[layer_idx]
        return None if self.arriving.start == 0 else layer.recurrent_states[0]

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        """Store what `get_linear_cache` returns."""
        layer: Any = self.layers[layer_idx]
        layer.update_recurrent_state(linear_cache)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._tokens

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self._tokens + query_length, 0

    def reset(self) -> None:
        self.layers[:] = self._layers()
        self.groups.clear()
        self.layout = self.real_BT = self.own = None
        self._tokens = self._arriving = 0

    def crop(self, tokens_to_remove: int) -> NoReturn:
        """Refuse to forget tokens."""
        raise RingConfigError.wrong(
            "generate", "decoding that keeps all tokens", f"{tokens_to_remove} taken back", "sample"
        )


class RingCacheLayer(CacheLayerMixin):
    """Hold this rank's part of one layer's keys and values, [B, G, S, D]."""

    def __init__(self, cache: RingCache) -> None:
        super().__init__()
        self._cache = cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys, self.values = self._room(key_states), self._room(value_states)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store keys and values [B, G, Q, D]; return what attention reads.

        Of a prompt that is this rank's shard, for the ring pass. Later every rank has all new tokens, and
        gets back its part of the whole sequence.
        """
        self.keys, self.values = self._stored(self.keys, key_states), self._stored(self.values, value_states)
        self.is_initialized = True
        if self._cache.arriving.start == 0:
            return key_states, value_states
        return self.keys, self.values

    def _stored(self, stored_rows: Tensor | None, new: Tensor) -> Tensor:
        """Return `stored_rows` with this rank's arriving tokens, [B, G, Q, D] of a prompt or of all ranks."""
        cache = self._cache
        assert cache.layout is not None
        if cache.arriving.start == 0:
            stored = cache.layout.prompt.valid_tokens(cache.ring_rank)
            return self._room(new, new[:, :, :stored])
        assert stored_rows is not None
        if stored_rows.shape[2] < cache.layout.local_tokens:
            stored_rows = self._room(stored_rows, stored_rows)
        for index, position in enumerate(cache.arriving):
            slot = cache.layout.slot(cache.ring_rank, position)
            if slot is not None:
                stored_rows[:, :, slot] = new[:, :, index]
        return stored_rows

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cache.get_mask_sizes(query_length, 0)

    def get_seq_length(self) -> int:
        return self._cache.get_seq_length()

    def get_max_length(self) -> int:
        return -1  # transformers' word for none

    def _room(self, like: Tensor, first_rows: Tensor | None = None) -> Tensor:
        """Return zeros [B, G, S, D] for all reserved slots; `first_rows` fills the first ones."""
        assert self._cache.layout is not None
        batch, heads, _, head_dim = like.shape
        room = like.new_zeros(batch, heads, self._cache.layout.local_tokens, head_dim)
        if first_rows is not None:
            room[:, :, : first_rows.shape[2]] = first_rows
        return room


class RingStateLayer(LinearAttentionLayer):
    """Hold the states of a recurrent layer, and the last inputs of its convolution, whole on every rank."""

    def __init__(self, cache: RingCache, number_of_states: int = 1) -> None:
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)
        self._cache = cache

    def update_conv_state(
        self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **kwargs: Any
    ) -> Tensor:
        """Store the last inputs [B, C, Q] of a convolution; return those that it reads.

        Of a prompt that is this rank's shard: the convolution gets the tokens before it from other ranks.
        """
        width, size = conv_kernel_size, {"conv_kernel_size": conv_kernel_size}
        if self._cache.arriving.start > 0:
            inputs: Tensor = super().update_conv_state(conv_states, state_idx, **size, **kwargs)
            return inputs
        assert width is not None, "a layer whose convolution has a state says how wide it is"
        super().update_conv_state(self._cache.last_inputs(conv_states, width), state_idx, **size, **kwargs)
        return conv_states


class RingHybridLayer(RingStateLayer, RingCacheLayer):  # type: ignore[override, misc, unused-ignore]
    """Hold the states of a layer, and this rank's part of its keys and values."""

    def __init__(self, cache: RingCache, number_of_states: int = 1) -> None:
        RingCacheLayer.__init__(self, cache)
        RingStateLayer.__init__(self, cache, number_of_states)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Make room for keys and values (two arguments), or for a state (by name)."""
        (RingCacheLayer if args else RingStateLayer).lazy_initialization(self, *args, **kwargs)

    def reorder_cache(self, beam_idx: Any) -> None:
        RingStateLayer.reorder_cache(self, beam_idx)
        RingCacheLayer.reorder_cache(self, beam_idx)
