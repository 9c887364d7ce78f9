"""Attach transformers models to a ring, or refuse them: `attn_implementation="ds_ring"`.

`attach` gives a model the ring's attention and ties it to a session. A model is never trained silently on
another attention than its own: `check_model` asks `checks.py` and the table of variants first.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from torch import nn
from transformers import PreTrainedModel

from ds_ring.config.pattern_section import PatternConfig
from ds_ring.config.section import RingConfig, pattern_from_config
from ds_ring.data.session import RingSession
from ds_ring.errors import RingConfigError
from ds_ring.models import attention as _  # noqa: F401  registers the functions
from ds_ring.models import checks
from ds_ring.models.adapters import attach_tuners
from ds_ring.models.attention_name import NAME
from ds_ring.models.checks import UNMODIFIED
from ds_ring.models.copies import TransformersCopies
from ds_ring.models.model import CONFIG, MODEL
from ds_ring.models.model_adapter import (
    ModelAdapter,
    get_own_implementation,
    set_implementations,
)
from ds_ring.models.variant import AttachRequest
from ds_ring.models.variants import attention_names, encoder_modules, own_attention, variants
from ds_ring.patches import apply, patch
from ds_ring.plugin import PASSES

log = logging.getLogger(__name__)


def check_model(model: nn.Module, config: RingConfig) -> None:
    """Refuse a transformers model that cannot be given the ring's attention, or must keep one that is local.

    Raises:
        RingConfigError: with the model's class and its attn_implementation.
    """
    outermost = _find_models(model, outermost=True)
    checks.check_adapters(model)
    for outer in outermost:
        if config.attention == "ring" and not _keeps_its_own(config, outer):
            _refuse_unknown_encoder(outer)
    keep = {id(encoder) for outer in outermost for encoder in own_attention(outer)}
    for part in _find_models(model):
        implementation = part.config._attn_implementation
        if id(part) in keep or (_keeps_its_own(config, part) and implementation != NAME):
            continue  # nothing to do for a ring
        if own_attention(part) and config.attention == "ring":
            continue  # it joins image encoders and a language part, which is looked at by itself
        if config.attention == "ring" and (home := checks.find_attention_home(implementation)):
            got = f"{implementation!r} of {home}: the ring would replace it, and its mask"
            advice = (
                'use "sdpa" and a pattern ("mask_mod", say), or set yours after ds_ring.initialize, where it'
                " calls ds_ring.ring_attention: see configs/examples/batch_mask.py"
            )
            raise RingConfigError.wrong(type(part).__name__, "an attention of transformers", got, advice)
        as_is = config.attention == "as_is" and implementation == UNMODIFIED
        checks.check_class(part, AttachRequest(config, as_is, part in outermost))
        if implementation == NAME:
            continue
        if config.attention == "ring" and not (
            part._can_set_attn_implementation()
            or any(variant.uses_interface(type(part)) for variant in variants())
            or checks.bypasses_interface(part)
        ):
            raise RingConfigError(
                f"{type(part).__name__}: expected attention by transformers' attention interface, got another"
                " one, which would see this rank's tokens only; use a model such as Llama, Qwen or Mistral"
            )
        if config.attention == "as_is" and implementation != UNMODIFIED:
            _refuse_as_is(part, config)


def _keeps_its_own(config: RingConfig, model: PreTrainedModel) -> bool:
    """Return whether the section asks for no more than the model's own attention on one rank."""
    if getattr(model.config, "is_encoder_decoder", False):
        return False  # its batches are prepared as on several ranks
    # Any other pattern (LongNet's dilation, a window, documents) replaces the model's causal mask, as the
    # JSON asks: only with attn_implementation="ds_ring".
    is_plain_causal = config.pattern == PatternConfig()
    # Bits that do not depend on the ring's size are those of its blocks, on one rank, too.
    has_own_bits = PASSES[config.transport].whole_blocks
    one_rank = config.sequence_parallel_size == 1
    return not config.changes_models and one_rank and is_plain_causal and not has_own_bits


def _refuse_unknown_encoder(model: PreTrainedModel) -> None:
    """Refuse a model with an image encoder of whose images it is not known that a ring computes them exactly.

    Raises:
        RingConfigError: no variant knows its type.
    """
    kind = type(getattr(model.config, "vision_config", None))
    has_one = any(type(part.config) is kind for part in _find_models(model))
    if has_one and hasattr(model.base_model, "get_image_features") and not own_attention(model):
        types = ", ".join(name for variant in variants() for name in variant.encoder_types)
        known = f", or one of the model types {types}" if types else ""
        raise checks.cannot_run(
            model, f"no test compares its images with one process; use its language part alone{known}"
        )


def _refuse_as_is(part: PreTrainedModel, config: RingConfig) -> None:
    fault = f"not apply the pattern {pattern_from_config(config)} of the JSON"
    if config.sequence_parallel_size > 1:
        fault = "attend to this rank's tokens only"
    elif config.pattern.documents:
        fault += " and its documents"
    raise RingConfigError(
        f'{type(part).__name__}: "attention": "as_is" keeps {part.config._attn_implementation!r}, which would'
        f' {fault}; set "attention": "ring", or attn_implementation=\'{UNMODIFIED}\' and backend="ds_ring"'
    )


def attach(model: nn.Module, session: RingSession) -> list[ModelAdapter]:
    """Give every transformers model inside `model` the ring's attention; leave other modules alone.

    From then on a forward pass takes batches of `session.shard_batch` only, never uses a cache, and gets its
    loss from labels that were shifted before they were sharded. With `"attention": "as_is"` a model with
    sdpa keeps it, and runs through the backend "ds_ring" only.

    Raises:
        RingConfigError: `check_model`'s, or a sub-model did not take the attention.
    """
    check_model(model, session.config)
    config, attached = session.config, []
    attach_tuners(model)
    session.needs.copies, session.needs.encoder_modules = TransformersCopies(), encoder_modules
    for part in _find_models(model, outermost=True):
        before = part.config._attn_implementation
        if before != NAME and _keeps_its_own(config, part):
            continue
        implementations = {inner: get_own_implementation(inner) for inner in _find_models(part)}
        if config.attention == "ring":
            _switch(part, session)
        rewritten = part.config._attn_implementation != NAME
        attached.append(ModelAdapter(part, session, rewritten, implementations))
        attached[-1].install()
        session.attached.append(attached[-1].off)
        if rewritten:
            log.info(
                'attn_implementation=%r in %s ("attention": "as_is"): its attention is the ring\'s after'
                ' engine.compile(backend="ds_ring"), and a forward pass without it raises',
                UNMODIFIED,
                type(part).__name__,
            )
    return attached


_sets_attention = patch(
    MODEL, "set_attn_implementation", stage="at_initialize", kind="registered", feature="attention",
    reason="every model inside the model gets the name; image encoders keep their own attention",
)  # fmt: skip
_sets_name = patch(
    CONFIG, "_attn_implementation", stage="at_initialize", kind="set", feature="attention.none",
    reason="the name, of a model without the interface", when="transformers cannot set it",
)  # fmt: skip


def _switch(model: PreTrainedModel, session: RingSession) -> None:
    """Give a model and the models inside it the ring's attention, and check that all of them took it."""
    before = model.config._attn_implementation
    parts = _find_models(model)
    for part in parts:
        if checks.bypasses_interface(part):
            apply(_sets_name.to(NAME), session=session, config=part.config)
    if all(map(checks.bypasses_interface, parts)):
        log.info("%s: attn_implementation=%r became %r", type(model).__name__, before, NAME)
        return
    names = attention_names(model, NAME)

    @_sets_attention
    def switch_all() -> Callable[[], None]:
        earlier = {part: part.config._attn_implementation for part in parts}
        model.set_attn_implementation(names)
        return lambda: set_implementations(earlier)

    try:
        known = checks.uses_interface(type(model)) or not own_attention(model)
        if model._can_set_attn_implementation() and known:
            apply(switch_all, session=session, model=model)
        else:  # a model without softmax attention, or one that leaves attention to the models inside it
            apply(_sets_name.to(names), session=session, config=model.config)
    except (ValueError, ImportError) as error:
        raise RingConfigError(
            f"{type(model).__name__}: expected a model that takes '{NAME}', got {before!r} and {error}"
        ) from error
    keep = own_attention(model)
    for part in _find_models(model):
        if part not in keep and part.config._attn_implementation != NAME:
            raise RingConfigError(
                f"{type(part).__name__} in {type(model).__name__}: expected '{NAME}' attention, got"
                f" {part.config._attn_implementation!r}, over this rank's tokens only; use another model"
            )
    if before != NAME:
        log.info("%s: attn_implementation=%r became %r", type(model).__name__, before, NAME)


def _find_models(model: nn.Module, outermost: bool = False) -> list[PreTrainedModel]:
    """Return the transformers models in `model`, without those inside another one if `outermost`."""
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    if not outermost:
        return parts
    inner = {id(part) for outer in parts for part in outer.modules() if part is not outer}
    return [part for part in parts if id(part) not in inner]
