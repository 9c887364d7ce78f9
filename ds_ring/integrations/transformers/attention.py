"""Give transformers models the ring's attention: `attn_implementation="ds_ring"`.

`attach` gives a model the ring's attention and ties it to a session. `checks.py` refuses what a ring does not
compute (dropout, a cache): a model is never trained silently on another attention than its own.

The sharding of the batch travels as a keyword argument from the model's forward down to attention, so it is
not global state and survives gradient checkpointing.

Shapes: B samples, H query heads, G key/value heads, S local tokens, D head dim.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ds_ring.config.pattern_section import PatternConfig
from ds_ring.config.section import RingConfig, pattern_from_config
from ds_ring.errors import RingConfigError, RingPatternError, RingShapeError
from ds_ring.integrations.deepspeed.batch import SHARDING
from ds_ring.integrations.deepspeed.batch_sharding import BatchSharding
from ds_ring.integrations.deepspeed.session import RingSession
from ds_ring.integrations.transformers import checks
from ds_ring.integrations.transformers.attached import (
    REWRITTEN,
    Attached,
    own_implementation,
    set_implementations,
)
from ds_ring.integrations.transformers.attention_name import NAME, name_them
from ds_ring.integrations.transformers.checks import check_class
from ds_ring.integrations.transformers.compressed import check_section, compresses, entries_of
from ds_ring.integrations.transformers.encoder_decoders import check_pair, is_pair
from ds_ring.integrations.transformers.generation import CachedSharding
from ds_ring.integrations.transformers.images import (
    attention_of_parts,
    image_encoders,
    refuse_unknown_encoder,
)
from ds_ring.integrations.transformers.indexed import ChosenMask
from ds_ring.integrations.transformers.indexed import attend as attend_to_chosen
from ds_ring.integrations.transformers.latents import Latents
from ds_ring.integrations.transformers.layer_masks import (
    LayerMask,
    is_causal,
    pattern_in,
    read_mask,
    said_by_call,
)
from ds_ring.integrations.transformers.model import TABLE
from ds_ring.integrations.transformers.recurrent_parts import attends_recurrently, is_recurrent
from ds_ring.integrations.transformers.score_terms import RelativeBias, TermsMask
from ds_ring.integrations.transformers.written_out import FAMILIES, family_of
from ds_ring.masks.mask_mod import Softcap, with_key_terms
from ds_ring.masks.pattern import Pattern

log = logging.getLogger(__name__)

UNMODIFIED = "sdpa"  # what backend.py rewrites


def attention(
    module: nn.Module,
    q_BHSD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    attention_mask: Tensor | LayerMask | ChosenMask | TermsMask | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention by transformers' interface: heads before tokens in, tokens before heads out."""
    sharding: BatchSharding | str | None = kwargs.pop(SHARDING, None)
    if sharding is None and isinstance(attention_mask, LayerMask):
        sharding = attention_mask.sharding
    if sharding == REWRITTEN:
        checks.refuse_foreign_arguments(type(module).__name__, kwargs)
        assert attention_mask is None or isinstance(attention_mask, Tensor), "a graph has masks of numbers"
        found: tuple[Tensor, None] = sdpa_attention_forward(
            module, q_BHSD, k_BGSD, v_BGSD, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return found
    if not isinstance(sharding, BatchSharding):
        raise RingConfigError(
            f"{type(module).__name__}: attn_implementation='{NAME}' needs to be told the ring, and was told"
            " none; start with ds_ring.initialize(model=...), or call"
            " ds_ring.integrations.transformers.attention.attach(model, session). Where that was done, the"
            " model does not hand its keyword arguments down to attention: build it with"
            f" attn_implementation='{UNMODIFIED}', set"
            ' "attention": "as_is" in the "ring_attention" section, and say engine.compile(backend="ds_ring")'
        )
    sinks, cap = kwargs.pop("s_aux", None), kwargs.pop("softcap", None)
    chosen: Tensor | None = kwargs.pop("indices", None)
    blocks = kwargs.pop("block_indices", None)  # of indexed.py, so positions
    chosen = blocks if chosen is None else chosen
    terms: TermsMask | None = None
    if isinstance(attention_mask, ChosenMask):
        chosen, attention_mask = attention_mask.chosen, attention_mask.mask
    if isinstance(attention_mask, TermsMask):
        terms, attention_mask = attention_mask, attention_mask.mask
    score_mod = kwargs.pop("score_mod", None)  # of written_out.py
    bias = kwargs.get("position_bias")
    if isinstance(bias, RelativeBias):  # another one is refused
        del kwargs["position_bias"]
    if sharding.cross is not None:
        said = _said(module, attention_mask, kwargs)
        if said is not None and not said.is_causal:
            sharding = sharding.cross  # the decoder's own attention is causal
    pattern = _pattern(module, sharding, attention_mask, dropout, kwargs)
    entries = entries_of(module)
    # More keys than queries: of a cache, or of another sequence. Both would be cut wrongly.
    others = isinstance(sharding, CachedSharding) or entries or sharding.key_layout is not None
    if k_BGSD.shape[2] != q_BHSD.shape[2] and not others:
        raise RingShapeError(
            f"keys: expected as many local tokens as queries, {q_BHSD.shape[2]}, got {k_BGSD.shape[2]}; a"
            " cache or cross attention is not supported: pass use_cache=False"
        )
    if terms is not None:
        if pattern is None or scaling is None:
            raise RingConfigError(
                f"{type(module).__name__} adds a term of each key to the scores, which a compiled model does"
                " not do on a ring; do not compile it"
            )
        if isinstance(sharding, CachedSharding):
            raise RingConfigError(
                f"{type(module).__name__}: expected a call without a cache, got one, whose learned terms of"
                " keys lie on all ranks; generate in engine.ring.off()"
            )
        q_BHSD, k_BGSD = with_key_terms(q_BHSD, k_BGSD, terms.terms, scaling)
        chosen = terms.largest(sharding, pattern)
    if chosen is not None:  # `pattern` was applied when they were chosen
        if cap is not None:
            raise RingConfigError(
                f"{type(module).__name__}: expected no softcap beside chosen keys, got {cap}"
            )
        out_BHSD = attend_to_chosen(sharding, q_BHSD, k_BGSD, v_BGSD, chosen, scaling, sinks)
        return out_BHSD.transpose(1, 2).contiguous(), None
    if entries is not None:
        if cap is not None or score_mod is not None:
            raise RingConfigError(
                f"{type(module).__name__}: expected no softcap or score_mod beside compressed entries, got"
                " one, which no ring computes there; set it to None in the configuration of the model"
            )
        out_BHSD = entries.attend(q_BHSD, k_BGSD, sharding, pattern, scaling, sinks)
        return out_BHSD.transpose(1, 2).contiguous(), None
    if isinstance(bias, RelativeBias) and bias.has_table:
        if pattern is None:
            raise RingConfigError(
                f"{type(module).__name__} adds a learned bias of distances to the scores, which a compiled"
                " model does not do on a ring; do not compile it"
            )
        out_BHSD = bias.attend(sharding, q_BHSD, k_BGSD, v_BGSD, pattern, scaling)
        return out_BHSD.transpose(1, 2).contiguous(), None
    changed, up = score_mod if cap is None else Softcap(float(cap)), None
    latents = getattr(module, "expand_kv", None)
    if isinstance(latents, Latents):  # then k and v are the latent and the rotary key
        if sharding.mesh.ring_size == 1 or isinstance(sharding, CachedSharding):
            k_BGSD, v_BGSD = latents.expanded(k_BGSD, v_BGSD)
        else:
            up = latents.up_projection(k_BGSD)
            k_BGSD, v_BGSD = k_BGSD.to(up.dtype), v_BGSD.to(up.dtype)
    out_BHSD = sharding.attention(scaling, pattern, changed)(q_BHSD, k_BGSD, v_BGSD, sinks, up)
    return out_BHSD.transpose(1, 2).contiguous(), None


def _pattern(
    module: nn.Module, sharding: BatchSharding, mask: object, dropout: float, kwargs: dict[str, Any]
) -> Pattern | None:
    """Return who attends to whom in this layer; None for the JSON's pattern.

    Raises:
        RingConfigError, RingPatternError: what a ring does not compute, or is not what the JSON says.
    """
    name = type(module).__name__
    if torch.compiler.is_compiling():  # by another compiler: windows of layers were refused before
        checks.check_attention_call(name, None, dropout, kwargs)
        if is_causal(module, kwargs) != sharding.patterns.pattern.is_causal:
            raise RingPatternError(f"{name}: set pattern.causal in the JSON to what the model is")
        return None
    checks.check_attention_call(name, None if isinstance(mask, LayerMask) else mask, dropout, kwargs)
    return pattern_in(module, sharding, _said(module, mask, kwargs))


def _said(module: nn.Module, mask: object, kwargs: dict[str, Any]) -> Pattern | None:
    """Return what a layer says of itself; None where it hides all."""
    return mask.pattern if isinstance(mask, LayerMask) else said_by_call(module, kwargs)


def mask(*, mask_function: Callable[..., Any], attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
    """Return what the layers that get this mask attend to; in a graph a tensor for the backend to read.

    Raises:
        RingPatternError: a padding mask, or one that no pattern stands for.
    """
    # The backend compares it with the pattern. Other compilers drop it: the batch's own mask was refused.
    if torch.compiler.is_compiling():  # Dynamo cannot look into functions
        return sdpa_mask(**kwargs, mask_function=mask_function, attention_mask=attention_mask)
    # Models of written_out.py make one of ones; the batch's own mask was refused before.
    makes_one = getattr(kwargs.get("config"), "model_type", None) in FAMILIES
    if attention_mask is not None and not (makes_one and bool(attention_mask.all())):
        raise RingPatternError(
            f"attention_mask: expected none, got {list(attention_mask.shape)}; {checks.THROUGH_SHARD_BATCH}"
        )
    return read_mask(mask_function)


# In place of attention_name.py's functions, which import this file.
name_them(attention, mask)


def check_model(model: nn.Module, config: RingConfig) -> None:
    """Refuse a transformers model that cannot be given the ring's attention, or must keep one that is local.

    Raises:
        RingConfigError: with the model's class and its attn_implementation.
    """
    outermost = _pretrained(model, outermost=True)
    checks.check_adapters(model)
    for outer in outermost:
        if config.attention == "ring" and not _keeps_its_own(config, outer):
            refuse_unknown_encoder(outer)
        if is_pair(outer):
            check_pair(outer, config)
    keep = {id(encoder) for outer in outermost for encoder in image_encoders(outer)}
    for part in _pretrained(model):
        implementation = part.config._attn_implementation
        if id(part) in keep or (_keeps_its_own(config, part) and implementation != NAME):
            continue  # nothing to do for a ring
        if image_encoders(part) and config.attention == "ring":
            continue  # it joins image encoders and a language part, which is looked at by itself
        if config.layout in ("striped", "residue") and any(map(is_recurrent, part.modules())):
            raise RingConfigError(
                f'{type(part).__name__}: layout: expected one whose shards are consecutive tokens ("auto",'
                f' "zigzag", "contiguous" or "balanced"), since its layers pass a state from token to token,'
                f' got "{config.layout}"'
            )
        if any(map(compresses, part.modules())):
            check_section(part, config)
        check_class(part, as_is=config.attention == "as_is" and implementation == UNMODIFIED)
        if implementation == NAME:
            continue
        if config.attention == "ring" and not (
            part._can_set_attn_implementation() or attends_recurrently(type(part)) or family_of(part)
        ):
            raise RingConfigError(
                f"{type(part).__name__}: expected a model that takes attn_implementation='{NAME}', got one"
                " whose attention does not go through transformers' attention interface, so each rank would"
                " attend to its own tokens only; use a model that does, such as Llama, Qwen or Mistral"
            )
        if config.attention == "as_is" and implementation != UNMODIFIED:
            _refuse_as_is(part, config)


def _keeps_its_own(config: RingConfig, model: PreTrainedModel) -> bool:
    """Return whether a model as it is, over the whole sequence, is what is asked for."""
    if getattr(model.config, "is_encoder_decoder", False):
        return False  # it is told which sequence is which, and gets its loss, as on several ranks
    # Any other pattern (LongNet's dilation, a window, documents) replaces the model's causal mask, as the
    # JSON asks: only with attn_implementation="ds_ring".
    is_plain_causal = config.pattern == PatternConfig()
    return not config.long_sequence.any and config.sequence_parallel_size == 1 and is_plain_causal


def _refuse_as_is(part: PreTrainedModel, config: RingConfig) -> None:
    fault = f"not apply the pattern {pattern_from_config(config)} of the JSON"
    if config.sequence_parallel_size > 1:
        fault = "attend to this rank's tokens only"
    elif config.pattern.documents:
        fault += " and its documents"
    raise RingConfigError(
        f'{type(part).__name__}: "attention": "as_is" keeps its attn_implementation'
        f" {part.config._attn_implementation!r}, which would {fault} and which no backend can rewrite; set"
        f' "attention": "ring" in the section, or build the model with attn_implementation=\'{UNMODIFIED}\''
        ' and say engine.compile(backend="ds_ring")'
    )


def attach(model: nn.Module, session: RingSession) -> list[Attached]:
    """Give every transformers model inside `model` the ring's attention; leave other modules alone.

    From then on a forward pass takes batches of `session.shard_batch` only, never uses a cache, and gets its
    loss from labels that were shifted before they were sharded. With `"attention": "as_is"` a model with
    sdpa keeps it, and runs through the backend "ds_ring" only.

    Raises:
        RingConfigError: `check_model`'s, or a sub-model did not take the attention.
    """
    check_model(model, session.config)
    config, attached = session.config, []
    for part in _pretrained(model, outermost=True):
        before = part.config._attn_implementation
        if before != NAME and _keeps_its_own(config, part):
            continue
        own = {inner: own_implementation(inner) for inner in _pretrained(part)}
        if config.attention == "ring":
            _switch(part, session)
        rewritten = part.config._attn_implementation != NAME
        attached.append(Attached(part, session, rewritten, own))
        attached[-1].put_on()
        session.attached.append(attached[-1].off)
        if rewritten:
            log.info(
                'attn_implementation=%r in %s ("attention": "as_is"): its attention is the ring\'s after'
                ' engine.compile(backend="ds_ring"), and a forward pass without it raises',
                UNMODIFIED,
                type(part).__name__,
            )
    return attached


def _switch(model: PreTrainedModel, session: RingSession) -> None:
    """Give a model and the models inside it the ring's attention, and check that all of them took it."""
    before = model.config._attn_implementation
    parts = _pretrained(model)
    for part in parts:
        if family_of(part) is not None:
            TABLE.apply({"attention.none": SimpleNamespace(at_initialize=NAME)}, session, config=part.config)
    if all(family_of(part) is not None for part in parts):
        log.info("%s: attn_implementation=%r became %r", type(model).__name__, before, NAME)
        return
    names = attention_of_parts(model, NAME)

    def switch_all() -> Callable[[], None]:
        earlier = {part: part.config._attn_implementation for part in parts}
        model.set_attn_implementation(names)
        return lambda: set_implementations(earlier)

    switch = SimpleNamespace(at_initialize=switch_all)
    try:
        known = checks.uses_interface(type(model)) or not image_encoders(model)
        if model._can_set_attn_implementation() and known:
            TABLE.apply({"attention": switch}, session, model=model)
        else:  # RWKV has no attention but a recurrence; DeepSeek-VL leaves it to its parts to have one
            TABLE.apply(
                {"attention.none": SimpleNamespace(at_initialize=names)}, session, config=model.config
            )
    except (ValueError, ImportError) as error:
        raise RingConfigError(
            f"{type(model).__name__}: expected a model that takes attn_implementation='{NAME}', got"
            f" {before!r} and the error: {error}"
        ) from error
    keep = image_encoders(model)
    for part in _pretrained(model):
        if part not in keep and part.config._attn_implementation != NAME:
            raise RingConfigError(
                f"{type(part).__name__} inside {type(model).__name__}: expected it to take"
                f" attn_implementation='{NAME}', but it keeps {part.config._attn_implementation!r} and would"
                " attend to this rank's tokens only; leave that part out, or use another model"
            )
    if before != NAME:
        log.info("%s: attn_implementation=%r became %r", type(model).__name__, before, NAME)


def _pretrained(model: nn.Module, outermost: bool = False) -> list[PreTrainedModel]:
    """Return the transformers models in `model`, without those inside another one if `outermost`."""
    found = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    if not outermost:
        return found
    inner = {id(part) for outer in found for part in outer.modules() if part is not outer}
    return [part for part in found if id(part) not in inner]
