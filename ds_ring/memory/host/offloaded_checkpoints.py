"""Checkpoints of layers on the host: what "offload_checkpoints" of "long_sequence" does to a model."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.autograd.graph import saved_tensors_hooks
from transformers import PreTrainedModel

from ds_ring.data.session import RingSession
from ds_ring.errors import RingConfigError
from ds_ring.memory.host.host_memory import LAYER_TENSORS, HostMemory
from ds_ring.memory.regions import ResultStore
from ds_ring.models.model import MODEL, PRETRAINED, TABLE
from ds_ring.models.model_part import Loss, ModelPart
from ds_ring.patches import apply, patch

log = logging.getLogger(__name__)

_KEY = "long_sequence.offload_checkpoints"
_offload_patch = partial(patch, when=_KEY)
_checks_checkpoints = _offload_patch(
    MODEL, stage="before_forward", feature="offloaded checkpoints",
    reason="checkpointing may have been switched on anew",
)  # fmt: skip
_offloads = _offload_patch(
    TABLE.given("checkpointed", PRETRAINED), "_gradient_checkpointing_func", stage="around_forward",
    kind="replaced", feature="offloaded checkpoints.layers",
    reason="calls the original under torch's saved_tensors_hooks, which keep tensors on the host",
)  # fmt: skip


class OffloadedCheckpoints(ModelPart):
    """Keep checkpoints of the layers on the host, where the JSON asks for it."""

    def patches(self, loss: Loss) -> list[Any]:
        """Return the hook that moves the checkpoints of each pass to the host."""
        patch = offloaded_checkpoints(self.model, self.session)
        return [] if patch is None else [patch]


_FUNCTION = "_gradient_checkpointing_func"  # by which transformers' layers call what checkpoints them


@dataclass(frozen=True)
class _Offloading:
    """Checkpoint as `plain` does, with the tensors that it saves on the host.

    Not torch's `save_on_cpu`: it copies on the stream of the computation, which then waits for the copies.
    """

    plain: Callable[..., Any]
    memory: HostMemory

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with saved_tensors_hooks(self.memory.put, self.memory.get):
            return self.plain(function, *args, **kwargs)


def offloaded_checkpoints(model: PreTrainedModel, session: RingSession) -> Callable[..., None] | None:
    """Return the hook that keeps checkpoints of the layers on the host, where the JSON asks for it.

    The layers are checkpointed from then on.

    Raises:
        RingConfigError: the JSON asks for it by name, and the model cannot be checkpointed.
    """
    choice = session.config.long_sequence.offload_checkpoints
    if choice is False or (choice == "auto" and session.device.type == "cpu"):
        return None
    name = type(model).__name__
    if not model.supports_gradient_checkpointing:
        if choice != "auto":
            raise RingConfigError(
                f'{name}: {_KEY}: expected layers that can be checkpointed, got none; set it to "auto"'
            )
        log.info('offload_checkpoints "auto": %s does not support checkpointing', name)
        return None
    if not model.is_activation_checkpointing:
        log.info("%s: its layers are checkpointed from now on (long_sequence.offload_checkpoints)", name)
        model.activation_checkpointing_enable({"use_reentrant": False})
    memory = session.run_mesh.owners[HostMemory]
    session.run_mesh.owners[ResultStore].store = memory
    # A layer's input alone where all of attention is run again: more would occupy the device for nothing.
    memory.ahead = 1 if session.config.recompute_attention is True else LAYER_TENSORS

    @_checks_checkpoints
    def before(*_: Any) -> None:  # in each pass: it may have been switched on anew, without ours
        for module in model.modules():
            function = vars(module).get(_FUNCTION)
            if function is not None and not isinstance(function, _Offloading):
                inner = getattr(function, "func", function)
                if getattr(inner, "__module__", "").startswith("deepspeed."):
                    raise RingConfigError.wrong(
                        _KEY, "torch's checkpoints", "DeepSpeed's", "use cpu_checkpointing instead"
                    )
                apply(_offloads.to(_Offloading(function, memory)), session=session, checkpointed=module)

    return before
