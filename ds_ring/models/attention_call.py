"""One call of attention by a layer of a transformers model: its operands, and what its mask means on a ring.

Shapes: B samples, H query heads, G key/value heads, S local tokens, D and E head dims of keys and values.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ds_ring.attention_module import RingAttention
from ds_ring.data.batch_sharding import BatchSharding, RowsAttention
from ds_ring.errors import RingConfigError, RingPatternError, RingShapeError
from ds_ring.layers.scores import Softcap
from ds_ring.masks.pair_masks import ScoreFunction
from ds_ring.masks.pattern import Pattern
from ds_ring.models.layer_masks import (
    LayerMask,
    choose_layer_pattern,
    is_causal,
    read_call_pattern,
)

# Arguments with which models change what attention computes; a ring has none of it.
_FOREIGN_ARGUMENTS = (
    "softcap",
    "s_aux",
    "sinks",
    "position_bias",
    "head_mask",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
)


@dataclass
class AttentionCall:
    """Hold what a layer hands to attention; variants change it before the core computes it.

    Attributes:
        mask: a `LayerMask` or None, once variants have read the call.
        sharding: of the sequence whose keys the layer reads.
        arguments: keyword arguments of the layer that no variant has taken yet.
        taken: what a variant took in `read` and needs in `attend`, by a name of its own.
        pattern: which query attends to which key, documents apart. None in compiled code: the JSON's pattern.
    """

    module: nn.Module
    q_BHSD: Tensor
    k_BGSD: Tensor
    v_BGSE: Tensor
    mask: Any
    sharding: BatchSharding
    scale: float | None = None
    dropout: float = 0.0
    arguments: dict[str, Any] = field(default_factory=dict)
    taken: dict[str, Any] = field(default_factory=dict)
    sinks: Tensor | None = None
    softcap: float | None = None
    score_mod: ScoreFunction | None = None
    pattern: Pattern | None = None

    @property
    def name(self) -> str:
        return type(self.module).__name__

    def model_pattern(self) -> Pattern | None:
        """Return the pattern that the model itself gives the layer; None if it hides all keys."""
        if isinstance(self.mask, LayerMask):
            return self.mask.pattern
        return read_call_pattern(self.module, self.arguments)

    def check(self) -> None:
        """Refuse what a ring does not compute, and find the pattern.

        Raises:
            RingConfigError, RingPatternError: an argument or mask that no variant took, or a pattern that
                contradicts the JSON.
            RingShapeError: another number of keys than of queries, as of a cache.
        """
        # Another compiler: masks are tensors that it drops, and windows of layers were refused before.
        compiled = torch.compiler.is_compiling()
        mask = None if compiled or isinstance(self.mask, LayerMask) else self.mask
        check_attention_call(self.name, mask, self.dropout, self.arguments)
        if not compiled:
            if isinstance(self.mask, LayerMask):
                self.mask.check_blocks(self.sharding)
            self.pattern = choose_layer_pattern(self.module, self.sharding, self.model_pattern())
        elif is_causal(self.module, self.arguments) != self.sharding.patterns.pattern.is_causal:
            raise RingPatternError(f"{self.name}: set pattern.causal in the JSON to what the model is")
        queries, keys = self.q_BHSD.shape[2], self.k_BGSD.shape[2]
        has_other_keys = self.sharding.is_replicated or self.sharding.key_layout is not None
        if keys != queries and not has_other_keys:
            expected = f"expected as many local tokens as queries, {queries}, got {keys}"
            raise RingShapeError(f"keys: {expected}; pass use_cache=False, and leave cross attention out")

    def attention(self, make: type[RingAttention] | None = None) -> RowsAttention:
        """Return the ring's softmax attention of the layer, with its scale, pattern and soft cap."""
        changed = self.score_mod if self.softcap is None else Softcap(float(self.softcap))
        return self.sharding.attention(self.scale, self.pattern, changed, make)

    def softmax(self) -> Tensor:
        """Return softmax attention [B, H, S, E] over the keys of all ranks."""
        out: Tensor = self.attention()(self.q_BHSD, self.k_BGSD, self.v_BGSE, self.sinks)
        return out


def check_attention_call(name: str, mask: object, dropout: float, kwargs: dict[str, Any]) -> None:
    """Refuse dropout, mask tensors and extra terms of the scores."""
    if dropout:
        advice = "set attention_dropout of the configuration, or `dropout` of the attention modules, to 0"
        raise RingConfigError(f"{name}: expected no dropout inside attention, got {dropout}; {advice}")
    if mask is not None:
        got = f"{type(mask).__name__} {list(getattr(mask, 'shape', []))}"
        raise RingPatternError(f"{name}: expected no mask tensor, got {got}; set the pattern in the JSON")
    refuse_foreign_arguments(name, kwargs)


def refuse_foreign_arguments(name: str, kwargs: dict[str, Any]) -> None:
    """Refuse terms of the scores that a ring does not compute, and with them the backend's own attention."""
    for key in _FOREIGN_ARGUMENTS:
        if kwargs.get(key) is not None:
            advice = 'only sinks and softcap are computed, with "attention": "ring" in the section'
            raise RingPatternError(f"{name}: expected no {key}, got one; {advice}")
