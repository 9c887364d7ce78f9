"""Keep the checkpoints of a transformers model's layers in the host's memory.

Owns how transformers' checkpointing is switched on and wrapped. What a layer's checkpoint is: its input, and
(kept_results.py) what attention's gradient needs of the ring. Where they go is host_memory.py's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.autograd.graph import saved_tensors_hooks
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from ds_ring.errors import RingConfigError
from ds_ring.integrations.deepspeed.session import RingSession
from ds_ring.runtime.host_memory import LAYER_TENSORS, HostMemory

log = logging.getLogger(__name__)

_FUNCTION = "_gradient_checkpointing_func"  # by which transformers' layers call what checkpoints them


@dataclass(frozen=True)
class _Offloading:
    """Checkpoint as `plain` does, with the tensors that it saves on the host."""

    plain: Callable[..., Any]
    memory: HostMemory

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with saved_tensors_hooks(self.memory.put, self.memory.get):
            return self.plain(function, *args, **kwargs)


def offload_checkpoints(model: PreTrainedModel, session: RingSession) -> list[RemovableHandle]:
    """Checkpoint the model's layers and keep the checkpoints on the host, where the JSON asks for it.

    Raises:
        RingConfigError: the JSON asks for it by name, and the model cannot be checkpointed.
    """
    asked = session.config.long_sequence.offload_checkpoints
    if asked is False or (asked == "auto" and session.device.type == "cpu"):
        return []
    name = type(model).__name__
    if not model.supports_gradient_checkpointing:
        if asked != "auto":
            raise RingConfigError(
                f"{name}: long_sequence.offload_checkpoints: expected a model whose layers can be"
                ' checkpointed, got one that does not support it; set it to false or "auto"'
            )
        log.info('offload_checkpoints "auto": %s does not support checkpointing', name)
        return []
    if not model.is_activation_checkpointing:
        log.info("%s: its layers are checkpointed from now on (long_sequence.offload_checkpoints)", name)
        model.activation_checkpointing_enable({"use_reentrant": False})
    memory = session.mesh.host_memory
    memory.enabled = True
    # A layer's input alone where all of attention is run again: more would stand on the device for nothing.
    memory.ahead = 1 if session.config.recompute_attention is True else LAYER_TENSORS

    def before(*_: Any) -> None:  # in each pass: it may have been switched on anew, without ours
        for module in model.modules():
            if _FUNCTION in module.__dict__:
                setattr(module, _FUNCTION, _wrapped(module.__dict__[_FUNCTION], memory))

    return [model.register_forward_pre_hook(before)]


def _wrapped(function: Any, memory: HostMemory) -> _Offloading:
    if isinstance(function, _Offloading):
        return function
    inner = getattr(function, "func", function)
    if getattr(inner, "__module__", "").startswith("deepspeed."):
        raise RingConfigError(
            "long_sequence.offload_checkpoints: expected layers that are checkpointed by torch, got"
            " DeepSpeed's checkpointing, which keeps them itself: set it to false, and"
            ' "cpu_checkpointing": true in "activation_checkpointing"'
        )
    return _Offloading(function, memory)
