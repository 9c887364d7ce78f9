"""Doge's dynamic mask on a ring: a learned term of each key and K/V head in the scores.

Of more keys than `keep_window_size`, a query attends to those with the largest terms. On a ring the layer's
`prepare_dynamic_mask` is replaced by a `KeyTerms`, which hands the terms on. Attention makes them a dimension
of the keys, so that they travel and get their gradient with them, and `ring_select` finds the largest ones.

Shapes: B samples, G key/value heads, S local tokens, k keys of a query.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ds_ring.data.batch_sharding import BatchSharding
from ds_ring.layers.scores import with_key_terms
from ds_ring.layers.selection.rows import CHOOSES, attend_to_chosen, selected
from ds_ring.layers.selection.total_order import TotalOrder
from ds_ring.masks.pattern import Pattern
from ds_ring.models.attention_name import NAME
from ds_ring.models.checks import cannot_run, has_cache, not_compiled
from ds_ring.models.layer_masks import LayerMask
from ds_ring.models.model import TABLE
from ds_ring.models.variant import AttachRequest, Variant
from ds_ring.patches import patch

if TYPE_CHECKING:
    from ds_ring.models.attention_call import AttentionCall
    from ds_ring.models.model_adapter import ModelAdapter


class DynamicMask(Variant):
    """Layers that add a learned term of each key to the scores, and may keep the largest alone."""

    def matches(self, module: nn.Module) -> bool:
        return hasattr(module, "prepare_dynamic_mask") and hasattr(module, "dt_proj")

    def refuse(self, model: PreTrainedModel, request: AttachRequest) -> None:
        config = model.config.get_text_config()
        if config.model_type != "doge":
            return
        if config.is_moe:
            router = "its router takes the scores of an expert from two tokens of the batch"
            raise cannot_run(model, f"config.is_moe: {router}; set it to False, if that is your model")
        if request.as_is:
            advice = 'set "attention": "ring" in the section, and build it without attn_implementation'
            raise cannot_run(model, f"its layers add learned terms of keys to the scores; {advice}")

    def install(self, adapter: ModelAdapter) -> None:
        if not adapter.rewritten:
            super().install(adapter)

    def install_on(self, module: nn.Module, adapter: ModelAdapter) -> None:
        adapter.apply(KeyTerms(module), terms=module)
        adapter.session.needs.one_process = TotalOrder

    def read(self, call: AttentionCall) -> None:
        call.taken["terms"] = call.mask if isinstance(call.mask, TermsMask) else None
        if isinstance(call.mask, TermsMask):
            call.mask = call.mask.mask

    def attend(self, call: AttentionCall) -> Tensor | None:
        terms = call.taken["terms"]
        if terms is None:
            return None
        if call.pattern is None or call.scale is None:
            raise not_compiled(call.name, "adds a term of each key to the scores")
        if terms.terms.shape[2] != call.k_BGSD.shape[2]:
            raise has_cache(call.name)
        call.q_BHSD, call.k_BGSD = with_key_terms(call.q_BHSD, call.k_BGSD, terms.terms, call.scale)
        chosen = terms.largest(call.sharding, call.pattern, call.q_BHSD.shape[2])
        return call.softmax() if chosen is None else attend_to_chosen(call, chosen)

    def refuse_generation(self, model: PreTrainedModel) -> str | None:
        return CHOOSES if any(map(self.matches, model.modules())) else None


@dataclass(frozen=True, eq=False)
class TermsMask:
    """The mask of a layer, and the terms of its keys; replaces a mask tensor until attention."""

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

    def largest(self, sharding: BatchSharding, pattern: Pattern, queries: int) -> Tensor | None:
        """Return the keys with the largest terms [B, G, Q, k] of each query; None if it sees no more."""
        if self.most >= sharding.layout.tokens:
            return None

        def scores(samples: Any, some: slice, terms_BSG: Tensor) -> Tensor:
            count = len(range(*some.indices(queries)))
            return terms_BSG.transpose(1, 2).unsqueeze(2).expand(-1, -1, count, -1)

        terms_BSG = self.terms.detach().transpose(1, 2).contiguous()
        return selected(sharding, pattern, scores, self.most, terms_BSG)


@patch(
    TABLE.given("terms"), "prepare_dynamic_mask", stage="around_forward", kind="replaced",
    feature="key terms",
    reason="hands the terms of keys on, which travel with the keys; calls the original without a ring",
    when="a layer adds a learned term of each key (Doge)",
)  # fmt: skip
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
        if isinstance(attention_mask, Tensor):
            raise has_cache(type(self._layer).__name__)
        return TermsMask(attention_mask, dt_states, keep_window_size)
