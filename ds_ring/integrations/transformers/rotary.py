"""Give rotary embeddings that depend on the length of the sequence that of the whole batch.

Owns how they get the greatest position of the whole batch. transformers' dynamic NTK and LongRoPE (and own
code of models such as PhiMoE) choose their frequencies by `max(position_ids)`, which on a shard is the
shard's own.

So one slot more, with the greatest position of the batch, stands behind the position ids while such a module
runs, and its row of the result is taken off again: whatever a module computes from the maximum is then what
one process computes, without knowledge of its code. The position travels with the batch's sharding as a
tensor, so that a compiled graph serves every length.

Shapes: B samples, S local tokens, D rotary dimensions.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers.modeling_layers import GradientCheckpointingLayer

from ds_ring.errors import RingConfigError
from ds_ring.integrations.deepspeed.batch_sharding import RecentBatches

_BY_LENGTH = ("dynamic", "longrope")


def give_length(model: nn.Module, batches: RecentBatches) -> list[RemovableHandle]:
    """Give every rotary embedding in `model` that depends on the length that of the whole batch.

    Returns the handles of the hooks.

    Raises:
        RingConfigError: a module computes it inside a layer that may be computed again in the backward pass,
            or takes no position_ids.
    """
    handles: list[RemovableHandle] = []
    for name, module in model.named_modules():
        if depends_on_length(module):
            check_rotary(model, name, module)
            handles += _hook(module, batches)
    return handles


def depends_on_length(module: nn.Module) -> bool:
    """Return whether a rotary embedding's frequencies change with the greatest position."""
    types = getattr(module, "rope_type", None)
    if types is None:
        return False
    names = types.values() if isinstance(types, dict) else (types,)
    return any(kind in str(name) for name in names for kind in _BY_LENGTH) or _reads_the_maximum(module)


def _reads_the_maximum(module: nn.Module) -> bool:
    """Return whether a model's own code (PhiMoE's) asks for the greatest position itself."""
    try:
        source = inspect.getsource(inspect.unwrap(type(module).forward))
    except (OSError, TypeError):
        return False
    return "max(position_ids" in source or "position_ids.max(" in source


def check_rotary(model: nn.Module, name: str, module: nn.Module) -> None:
    """Refuse a rotary embedding that cannot be told the length; see `give_length`."""
    parts = name.split(".")
    around = [model.get_submodule(".".join(parts[:depth])) for depth in range(len(parts))]
    if any(isinstance(parent, GradientCheckpointingLayer) for parent in around):
        reason = "computed inside each layer, again in the backward pass of a checkpointed one"
    elif "position_ids" not in inspect.signature(module.forward).parameters:
        reason = "computed without position_ids"
    else:
        return
    raise RingConfigError(
        f"{type(model).__name__} cannot run on a ring: its rotary embedding {type(module).__name__}"
        " (rope_type"
        f" {module.rope_type!r}) depends on the length of the whole sequence, and is {reason}; set"
        ' rope_parameters["rope_type"] of the model\'s configuration to one that does not depend on it'
        " (default, linear, yarn, llama3)"
    )


def _hook(module: nn.Module, batches: RecentBatches) -> list[RemovableHandle]:
    signature = inspect.signature(module.forward)
    place = list(signature.parameters).index("position_ids")

    def before(
        _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if "position_ids" in kwargs:
            return args, kwargs | {"position_ids": _with_longest(kwargs["position_ids"], batches)}
        longer = _with_longest(args[place], batches)
        return (*args[:place], longer, *args[place + 1 :]), kwargs

    def after(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if isinstance(output, Tensor):
            return output[..., :-1, :]
        return tuple(part[..., :-1, :] for part in output)

    return [module.register_forward_pre_hook(before, with_kwargs=True), module.register_forward_hook(after)]


def _with_longest(position_ids: Tensor, batches: RecentBatches) -> Tensor:
    """Return position ids [..., S] and, behind them, the greatest of the batch: [..., S + 1]."""
    longest = batches.current.longest.to(position_ids)
    return torch.cat([position_ids, longest.expand(*position_ids.shape[:-1], 1)], dim=-1)
