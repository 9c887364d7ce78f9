"""transformers models on a ring: `attn_implementation="ds_ring"`.

Owns the attention function and the mask function registered under that name, and `attach`, which ties
a model to a session. Importing this file registers the name. What a model may ask of attention that a
ring would not do (a sliding window, dropout, a cache) is refused in `transformers_checks.py`: a model must
never be trained on another attention than its own without a word.

The placement of the batch travels as a keyword argument from the model's forward down to attention, so it
is no global state and survives gradient checkpointing.

Shapes: B samples, H query heads, G key/value heads, S local tokens, D head dim.
"""

from __future__ import annotations

import inspect
import logging
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from ds_ring.config import RingConfig
from ds_ring.errors import RingConfigError, RingShapeError
from ds_ring.integrations import transformers_checks as checks
from ds_ring.integrations.graph_placement import needs_backend_op
from ds_ring.integrations.placement import Placement
from ds_ring.integrations.session import RingSession
from ds_ring.schedule.pattern_config import pattern_from_config

log = logging.getLogger(__name__)

NAME = "ds_ring"
UNMODIFIED = "sdpa"  # what compile_backend.py rewrites
PLACEMENT = "ds_ring_placement"


def attention(
    module: nn.Module,
    q_BHSD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: heads in front of tokens in, tokens in front of heads out."""
    placement: Placement | None = kwargs.pop(PLACEMENT, None)
    if placement is None:
        raise RingConfigError(
            f"{type(module).__name__}: attn_implementation='{NAME}' needs to know the ring and got none;"
            " start with ds_ring.initialize(model=...), or call"
            " ds_ring.integrations.transformers.attach(model, session). (A model that does not hand its"
            " keyword arguments down to attention cannot be used.)"
        )
    checks.check_attention_call(module, placement, attention_mask, dropout, kwargs)
    if k_BGSD.shape[2] != q_BHSD.shape[2]:
        raise RingShapeError(
            f"keys: expected as many local tokens as queries, {q_BHSD.shape[2]}, got {k_BGSD.shape[2]}; a"
            " cache or cross attention is not supported: pass use_cache=False"
        )
    out_BHSD = placement.attention(scaling)(q_BHSD, k_BGSD, v_BGSD)
    return out_BHSD.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, checks.refuse_masks)


def check_model(model: nn.Module, config: RingConfig) -> None:
    """Refuse a transformers model whose attention would look at the local shard only.

    Raises:
        RingConfigError: with the model's class and its attn_implementation.
    """
    for part in _pretrained(model):
        implementation = part.config._attn_implementation
        if config.sequence_parallel_size == 1 and checks.is_plain_causal(config) and implementation != NAME:
            continue  # nothing to do for a ring
        checks.check_class(part)
        if implementation == UNMODIFIED:
            continue  # the backend may replace it; `attach` sees to it that nothing else runs it
        if implementation != NAME:
            fault = (
                "attend to this rank's tokens only"
                if config.sequence_parallel_size > 1
                else f"not apply the pattern {pattern_from_config(config)} of the JSON"
                + (" and its documents" if config.pattern.documents else "")
            )
            raise RingConfigError(
                f"{type(part).__name__}: expected attn_implementation='{NAME}', got {implementation!r}, which"
                f" would {fault}; build the model with"
                " attn_implementation='ds_ring' or call model.set_attn_implementation('ds_ring') (import"
                " ds_ring.integrations.transformers before), or leave 'sdpa' and say"
                ' engine.compile(backend="ds_ring")'
            )


def attach(model: nn.Module, session: RingSession) -> None:
    """Tie every transformers model inside `model` to `session`; other modules are left alone.

    From then on a forward pass takes batches of `session.shard_batch` only, never uses a cache, and gets its
    loss from labels that were shifted before they were sharded.
    """
    check_model(model, session.config)
    config = session.config
    alone = config.sequence_parallel_size == 1 and checks.is_plain_causal(config)
    for part in _pretrained(model, outermost=True):
        if part.config._attn_implementation == NAME:
            _attach_one(part, session)
        elif part.config._attn_implementation == UNMODIFIED and not alone:
            _attach_unmodified(part)


def _attach_one(model: PreTrainedModel, session: RingSession) -> None:
    guard = checks.LossGuard(model.loss_function)
    model.loss_function = guard
    name, signature = type(model).__name__, inspect.signature(model.forward)

    def before(
        _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        guard.used = False
        given = dict(signature.bind_partial(*args, **kwargs).arguments) | kwargs
        checks.check_model_call(name, given)
        if not torch.compiler.is_compiling():  # compiled, the engine's hook has selected it
            session.placements.select(x for x in given.values() if isinstance(x, Tensor))
        placement = session.placements.current
        checks.check_length(name, given, placement)
        checks.check_windows(model, placement)
        added: dict[str, Any] = {PLACEMENT: placement}
        if "use_cache" not in given:
            added["use_cache"] = False  # transformers' default would keep every layer's keys and values
        return args, kwargs | added

    def after(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        checks.check_loss(model, guard, output)

    model.register_forward_pre_hook(before, with_kwargs=True)
    model.register_forward_hook(after)


def _attach_unmodified(model: PreTrainedModel) -> None:
    """Let a model with its own attention run through the backend "ds_ring" only.

    The mark on its position ids raises wherever the backend has not taken it away. What the model's masks ask
    for is checked where the backend reads them.
    """
    guard = checks.LossGuard(model.loss_function)
    model.loss_function = guard
    name, signature = type(model).__name__, inspect.signature(model.forward)

    def before(
        _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        guard.used = False
        bound = signature.bind_partial(*args, **kwargs)
        given = dict(bound.arguments) | kwargs
        checks.check_model_call(name, given)
        marked = needs_backend_op(given["position_ids"])
        return bound.args, {"use_cache": False} | bound.kwargs | {"position_ids": marked}

    def after(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        checks.check_loss(model, guard, output)

    model.register_forward_pre_hook(before, with_kwargs=True)
    model.register_forward_hook(after)
    log.info(
        'attn_implementation=%r in %s: its attention is the ring\'s after engine.compile(backend="ds_ring"),'
        " and a forward pass without it raises",
        UNMODIFIED,
        name,
    )


def _pretrained(model: nn.Module, outermost: bool = False) -> list[PreTrainedModel]:
    """The transformers models in `model`, without those inside another one if `outermost`."""
    found = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    if not outermost:
        return found
    inner = {id(part) for outer in found for part in outer.modules() if part is not outer}
    return [part for part in found if id(part) not in inner]
