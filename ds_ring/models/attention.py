"""The attention function and the mask function of `attn_implementation="ds_ring"`.

A layer's call is an `AttentionCall`. The variants of the table read it, and the first one that the layer
belongs to computes it; any other layer is plain softmax. The sharding of the batch travels as a keyword
argument from the model's forward down to attention, so it is not global state and survives gradient
checkpointing.

Shapes: B samples, H query heads, G key/value heads, S local tokens, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ds_ring.data.batch import SHARDING
from ds_ring.data.batch_sharding import BatchSharding
from ds_ring.errors import RingConfigError, RingPatternError
from ds_ring.models import checks
from ds_ring.models.attention_call import AttentionCall, refuse_foreign_arguments
from ds_ring.models.attention_name import NAME
from ds_ring.models.layer_masks import LayerMask, read_mask
from ds_ring.models.model_call import REWRITTEN
from ds_ring.models.registration import name_them
from ds_ring.models.variants import variants

_VARIANTS = variants()  # in compiled code the table cannot be read anew


def attention(
    module: nn.Module,
    q_BHSD: Tensor,
    k_BGSD: Tensor,
    v_BGSE: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention by transformers' interface: heads before tokens in, tokens before heads out."""
    sharding: BatchSharding | str | None = kwargs.pop(SHARDING, None)
    if sharding is None and isinstance(attention_mask, LayerMask):
        sharding = attention_mask.sharding
    if sharding == REWRITTEN:
        refuse_foreign_arguments(type(module).__name__, kwargs)
        assert attention_mask is None or isinstance(attention_mask, Tensor), "a graph has masks of numbers"
        result: tuple[Tensor, None] = sdpa_attention_forward(
            module, q_BHSD, k_BGSD, v_BGSE, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return result
    if not isinstance(sharding, BatchSharding):
        raise RingConfigError(
            f"{type(module).__name__}: '{NAME}': expected a batch's sharding, got none; start with"
            f" ds_ring.initialize(model=...), or '{checks.UNMODIFIED}' and engine.compile"
        )
    call = AttentionCall(module, q_BHSD, k_BGSD, v_BGSE, attention_mask, sharding, scaling, dropout, kwargs)
    call.sinks, call.softcap = kwargs.pop("s_aux", None), kwargs.pop("softcap", None)
    call.score_mod = kwargs.pop("score_mod", None)  # of modules that compute their scores by themselves
    for variant in _VARIANTS:
        variant.read(call)
    call.check()
    out_BHSE = None
    for variant in _VARIANTS:
        out_BHSE = variant.attend(call)
        if out_BHSE is not None:
            break
    if out_BHSE is None:
        out_BHSE = call.softmax()
    return out_BHSE.transpose(1, 2).contiguous(), None


def mask(*, mask_function: Callable[..., Any], attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
    """Return what the layers that get this mask attend to; in a graph a tensor for the backend to read.

    Raises:
        RingPatternError: a padding mask, or one that no pattern can express.
    """
    # The backend compares it with the pattern. Other compilers drop it: the batch's own mask was refused.
    if torch.compiler.is_compiling():  # Dynamo cannot look into functions
        return sdpa_mask(**kwargs, mask_function=mask_function, attention_mask=attention_mask)
    # The batch's own mask was refused before.
    model_type = getattr(kwargs.get("config"), "model_type", "")
    makes_one = any(variant.makes_full_masks(model_type) for variant in _VARIANTS)
    if attention_mask is not None and not (makes_one and bool(attention_mask.all())):
        raise RingPatternError.wrong(
            "attention_mask", "none", list(attention_mask.shape), checks.THROUGH_SHARD_BATCH
        )
    return read_mask(mask_function)


# In place of registration.py's functions, which import this file.
name_them(attention, mask)
