"""Copy a model for one rank to run by itself, to compare the ring with.

Owns what of a model can be copied before DeepSpeed and the ring change it, its weights later, and which
attention and arguments it gets. See [Note: one process] in first_batch.py.
"""

from __future__ import annotations

import copy
import logging
from typing import Any

import torch
from torch import Tensor, nn

from ds_ring.config.pattern_section import PatternConfig
from ds_ring.config.section import RingConfig
from ds_ring.errors import RingConfigError
from ds_ring.integrations.deepspeed.batch_sharding import BatchSharding

log = logging.getLogger(__name__)


def refuse_dropout(model: nn.Module) -> None:
    """Raise a RingConfigError for a model with dropout, which no two runs share."""
    for name, module in model.named_modules():
        values = {key: value for key, value in vars(module).items() if key.endswith(("dropout", "layerdrop"))}
        if isinstance(module, nn.Dropout):
            values = {"p": module.p}
        active = next((key for key, value in values.items() if isinstance(value, float) and value > 0), None)
        if active is not None:
            raise RingConfigError(
                f"verify_first_batch: expected a model without dropout, got {name}.{active} ="
                f" {values[active]}: no two runs would be equal; set the dropout of the model's configuration"
                " to 0 for the run that verifies"
            )


def skeleton(model: nn.Module) -> nn.Module:
    """Return a copy whose parameters have no memory yet: whole shapes, also where ZeRO 3 has cut them."""
    memo: dict[int, Any] = {
        id(p): nn.Parameter(
            torch.empty(getattr(p, "ds_shape", p.shape), dtype=torch.float32, device="meta"), p.requires_grad
        )
        for p in model.parameters()
    }
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        raise RingConfigError(
            f"verify_first_batch: expected a model that can be copied, to run by itself, got"
            f" {type(error).__name__}: {error}; a module that holds a mesh or a RingAttention cannot be"
            " verified: let it ask engine.ring.attention() in its forward pass"
        ) from error


def filled(
    alone: nn.Module, module: nn.Module, weights: dict[str, Tensor], device: torch.device
) -> nn.Module:
    """Return the copy with the weights and buffers of the engine's model, in float32 or float64."""
    alone.to_empty(device=device)
    state = dict(alone.named_parameters()) | dict(alone.named_buffers())
    for name, value in [*weights.items(), *module.named_buffers()]:
        wide = torch.float32 if value.dtype in (torch.float16, torch.bfloat16) else value.dtype
        state[name].data = value.detach().to(device, wide, copy=True)
    for name, part in alone.named_modules():
        later = vars(module.get_submodule(name))  # the session, say: what was set after the copy was made
        vars(part).update(
            {key: value for key, value in later.items() if key[0] != "_" and vars(part).get(key) is None}
        )
    return alone.train()


def arguments_for(
    alone: nn.Module, kwargs: dict[str, Any], single: BatchSharding, divisor: float
) -> dict[str, Any]:
    """Return the arguments for all tokens at once: the loss is a mean over all labels of the world."""
    given = dict(kwargs)
    if isinstance(given.get("num_items_in_batch"), Tensor):
        given["num_items_in_batch"] = given["num_items_in_batch"] * divisor
    if not _is_of_transformers(alone):
        return given
    from ds_ring.integrations.transformers.attention_name import NAME
    from ds_ring.integrations.transformers.model_needs import SHARDING

    positions = given.get("position_ids")
    if positions is not None and bool((positions == torch.arange(single.layout.tokens)).all()):
        del given["position_ids"]  # the model numbers tokens by itself
    if getattr(alone.config, "_attn_implementation", None) == NAME:
        given[SHARDING] = single
    return given | {"use_cache": False}


def on_device(value: Any, device: torch.device) -> Any:
    """Return arguments with their tensors on `device`."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {name: on_device(item, device) for name, item in value.items()}
    if isinstance(value, tuple) and type(value) is tuple:
        return tuple(on_device(item, device) for item in value)
    return value


def _is_of_transformers(model: nn.Module) -> bool:
    return hasattr(model, "set_attn_implementation") and hasattr(model, "config")


def choose_attention(alone: nn.Module, config: RingConfig) -> None:
    """Give the copy its own attention where that is what the JSON asks for, else the ring's on one rank."""
    if not _is_of_transformers(alone):
        return
    from ds_ring.integrations.transformers.attention_name import NAME
    from ds_ring.integrations.transformers.images import attention_of_parts

    asked, model = config.pattern, alone.config
    # whether it is causal, and a window that is the model's, are what its own attention does
    rest = asked.model_copy(update={"causal": True, "window": None})
    own = rest == PatternConfig() and asked.window in (None, getattr(model, "sliding_window", None))
    if not own:
        alone.set_attn_implementation(attention_of_parts(alone, NAME))  # type: ignore[operator]
        log.info("verify_first_batch: the pattern is the JSON's own, so its mask is not compared")
    elif getattr(model, "_attn_implementation", None) == NAME:
        alone.set_attn_implementation("eager")  # type: ignore[operator]
