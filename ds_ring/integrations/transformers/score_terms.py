"""Learned terms of scores, in transformers models: T5's relative position bias, and Doge's dynamic mask.

[Note: a bias in bands]
T5 (Raffel et al. 2020) adds a number to the score of a query and a key that depends on the head and on the
bucket of their distance. The numbers are a table with a gradient. The pairs of a bucket are a band of
distances. So attention within each band is a ring pass of its own, its number is added to that pass's
log-sum-exps, and the bands merge by these as the parts of any attention do. Each pair is computed once, no
bias [S, T] exists, and autograd gives the table its gradient. A narrow band sends few tokens. What is kept
for the backward pass is an output for each band: up to 32 for T5, where attention without a bias keeps one.

Doge adds a term of each key and K/V head to the scores. Of more keys than `keep_window_size`, a query attends
to those with the largest terms. On a ring its `prepare_dynamic_mask` is replaced by a `KeyTerms`, which hands
the terms on. The attention function makes them a dimension of the keys, so that they travel and get their
gradient with them, and `ring_select` finds the largest ones.

Shapes: B samples, H query heads, G key/value heads, S local tokens, D head dim, N buckets.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ds_ring.errors import RingConfigError
from ds_ring.integrations.deepspeed.batch_sharding import BatchSharding
from ds_ring.integrations.transformers.attention_name import NAME
from ds_ring.integrations.transformers.indexed import selected
from ds_ring.integrations.transformers.layer_masks import LayerMask
from ds_ring.masks.catalog import Band
from ds_ring.masks.pattern import Pattern
from ds_ring.masks.tiles import UNBOUNDED


class RelativeBias:
    """Stand for the bias of a module until attention; without a table for none."""

    # Not a tensor: the layers of T5 hand the first one's bias on. The table is read where it is used, so that
    # a checkpointed layer that runs again gives it a gradient.
    def __init__(self, module: Any, has_table: bool) -> None:
        self._module = module
        self.has_table = has_table

    def bands(self, tokens: int) -> list[tuple[int, int, int]]:
        """Return (least, most, bucket) of query minus key for each stretch of distances of one bucket."""
        # Beyond the greatest distance all have the last bucket of their side.
        reach = min(tokens, self._module.relative_attention_max_distance + 1)
        distances = torch.arange(-reach, reach + 1)
        bucket_of = self._module._relative_position_bucket
        given = {
            "bidirectional": not self._module.is_decoder,
            "num_buckets": self._module.relative_attention_num_buckets,
            "max_distance": self._module.relative_attention_max_distance,
        }
        # UMT5's reads these off the module.
        buckets = bucket_of(
            -distances, **(given if "num_buckets" in inspect.signature(bucket_of).parameters else {})
        )
        starts = [0, *(buckets.diff().nonzero()[:, 0] + 1).tolist(), len(distances)]
        found = []
        for first, end in pairwise(starts):
            least = -UNBOUNDED if first == 0 else int(distances[first])
            most = UNBOUNDED if end == len(distances) else int(distances[end - 1])
            found.append((least, most, int(buckets[first])))
        return found

    def attend(
        self, sharding: BatchSharding, q_BHSD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor, pattern: Pattern,
        scale: float | None,
    ) -> Tensor:  # fmt: skip
        """Return attention with the bias [B, H, S, D]: [Note: a bias in bands]."""
        numbers = torch.arange(self._module.relative_attention_num_buckets, device=q_BHSD.device)
        table_NH = self._module.relative_attention_bias(numbers)
        outs, lses, (nearest, farthest) = [], [], pattern.distance
        for least, most, bucket in self.bands(sharding.layout.tokens):
            if most < nearest or least > farthest or least >= sharding.layout.tokens:
                continue
            attention = sharding.attention(scale, pattern & Band(least, most))
            out_BHSD, lse_BHS = attention(q_BHSD, k_BHSD, v_BHSD, return_lse=True)
            outs.append(out_BHSD)
            lses.append(lse_BHS + table_NH[bucket].to(lse_BHS.dtype)[:, None])
        parts_NBHS = torch.stack(lses)
        seen_BHS = (parts_NBHS > -torch.inf).any(dim=0)
        weights_NBHS = torch.softmax(parts_NBHS.where(seen_BHS, 0.0), dim=0)
        total_BHSD = sum(
            weight[..., None] * out.to(weight.dtype) for weight, out in zip(weights_NBHS, outs, strict=True)
        )
        assert isinstance(total_BHSD, Tensor)
        return total_BHSD.to(q_BHSD.dtype)


def around_bias(module: Any) -> Callable[..., Any]:
    """Return what runs in place of `compute_bias`; without a ring that is the module's own, or zeros."""
    own, has_table = module.compute_bias, bool(module.has_relative_attention_bias)

    def compute_bias(queries: int, keys: int, device: Any = None, past_seen_tokens: Any = 0) -> Any:
        if module.config._attn_implementation == NAME:
            return RelativeBias(module, has_table)
        if has_table:
            return own(queries, keys, device=device, past_seen_tokens=past_seen_tokens)
        return torch.zeros(1, module.n_heads, queries, keys, device=device, dtype=module.q.weight.dtype)

    return compute_bias


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
