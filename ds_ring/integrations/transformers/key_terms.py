"""Attention with a learned term for each key, in transformers models: Doge's dynamic mask.

Doge adds a term of each key and K/V head to the scores. Of more keys than `keep_window_size`, a query attends
to those with the largest terms. On a ring its `prepare_dynamic_mask` is replaced by a `KeyTerms`, which hands
the terms on. The attention function makes them a dimension of the keys, so that they travel and get their
gradient with them, and `ring_select` finds the largest ones.

Shapes: B samples, H query heads, G key/value heads, S local tokens, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ds_ring.errors import RingConfigError
from ds_ring.integrations.deepspeed.batch_sharding import BatchSharding
from ds_ring.integrations.transformers.attention_name import NAME
from ds_ring.integrations.transformers.indexed import selected
from ds_ring.integrations.transformers.layer_masks import LayerMask
from ds_ring.masks.pattern import Pattern


@dataclass(frozen=True, eq=False)
class TermsMask:
    """The mask of a layer, and the terms of its keys; stands for a mask tensor until attention."""

    mask: LayerMask | None
    terms: Tensor  # [B, G, S]
    most: int  # keys of a query

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.terms.shape, self.terms.shape[-1]))

    # `repeat_kv` repeats the terms for the query heads of a K/V head: ring attention does that by itself.
    def __getitem__(self, index: Any) -> TermsMask:
        return self

    def expand(self, *sizes: int) -> TermsMask:
        return self

    reshape = expand

    def largest(self, sharding: BatchSharding, pattern: Pattern) -> Tensor | None:
        """Return the keys with the largest terms [B, G, S, k] of each query; None if it sees no more."""
        if self.most >= sharding.layout.tokens:
            return None

        def scores(samples: Any, queries: slice, terms_BSG: Tensor) -> Tensor:
            count = len(range(*queries.indices(self.terms.shape[2])))
            return terms_BSG.transpose(1, 2).unsqueeze(2).expand(-1, -1, count, -1)

        terms_BSG = self.terms.detach().transpose(1, 2).contiguous()
        return selected(sharding, pattern, scores, self.most, terms_BSG)


class KeyTerms:
    """Return a `TermsMask` in place of `prepare_dynamic_mask`.

    With another attention function than the ring's, it is the layer's own.
    """

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        self._own: Callable[..., Any] = layer.prepare_dynamic_mask

    def __call__(
        self, hidden_states: Tensor, dt_states: Tensor, keep_window_size: int = 2048,
        attention_mask: Tensor | LayerMask | None = None,
    ) -> Any:  # fmt: skip
        # The layer reads the same attribute to choose its attention function: engine.ring.off() changes it.
        if self._layer.config._attn_implementation != NAME:
            return self._own(
                hidden_states=hidden_states,
                dt_states=dt_states,
                keep_window_size=keep_window_size,
                attention_mask=attention_mask,
            )
        if dt_states.shape[-1] != hidden_states.shape[1] or isinstance(attention_mask, Tensor):
            raise RingConfigError(
                f"{type(self._layer).__name__}: expected as many keys as queries, {hidden_states.shape[1]},"
                f" and no mask tensor, got {dt_states.shape[-1]} keys and {type(attention_mask).__name__}:"
                " terms of keys in a cache lie on all ranks; pass use_cache=False, or generate in"
                " engine.ring.off()"
            )
        return TermsMask(attention_mask, dt_states, keep_window_size)
