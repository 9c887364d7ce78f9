"""Record a training step: its forward passes, and weights and gradients as a whole on rank 0.

Owns what is recorded of a step and how it is gathered; first_batch.py compares it.

Shapes: B samples, T tokens, S local tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_ring.errors import RingVerifyError
from ds_ring.integrations.deepspeed.batch_sharding import BatchSharding
from ds_ring.integrations.deepspeed.packing import RowGroup
from ds_ring.masks.layer_patterns import LayerPatterns
from ds_ring.runtime.deferred_logits import DeferredLogits


class Attended(NamedTuple):
    """Describe a batch's attention, wherever its tokens lie."""

    tokens: int
    patterns: LayerPatterns
    groups: tuple[RowGroup, ...]


@dataclass
class Forward:
    """Record a forward pass of the step: inputs and outputs, of this rank's tokens or of all."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    attended: Attended
    logits: Tensor
    loss: Tensor | None
    layers: dict[str, Tensor]
    # what the training loop made of `loss`: its gradient; None where it is not used
    loss_factor: Tensor | None = None
    logits_gradient: Tensor | None = None  # gradient of the logits, for a loss of the training loop's own
    sharding: BatchSharding | None = None


def whole_weights(module: nn.Module) -> dict[str, Tensor]:
    """Return the whole parameters, on rank 0. Collective at ZeRO 3."""
    found = {}
    for name, parameter in module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            if dist.get_rank() == 0:
                found[name] = parameter.detach().cpu().clone()
    return found


def whole_gradients(module: nn.Module) -> dict[str, Tensor]:
    """Return the whole gradients as the engine reduced them, on rank 0. Collective at ZeRO 1, 2 and 3."""
    found = {}
    for name, parameter in module.named_parameters():
        gradient = deepspeed.utils.safe_get_full_grad(parameter) if parameter.requires_grad else None
        if gradient is not None and dist.get_rank() == 0:
            found[name] = gradient.detach().float().cpu().clone()
    return found


def gathered(piece: Forward | None) -> list[Forward]:
    """Return the pieces of all ranks that hold one, on rank 0. Collective."""
    pieces: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(piece, pieces, dst=0)
    return [one for one in pieces or () if one is not None]


def results_of(output: Any) -> tuple[Tensor, Tensor | None]:
    """Return logits (or hidden states) and loss of a model's output."""
    if isinstance(output, Tensor):
        return (output, None) if output.ndim else (output[None], output)
    loss = getattr(output, "loss", None)
    for name in ("logits", "last_hidden_state"):
        logits = getattr(output, name, None)
        if isinstance(logits, DeferredLogits) and loss is not None:
            with torch.no_grad():  # of a short batch: the loss and the gradients are those of the tiles
                return logits.tensor(), loss
        if isinstance(logits, Tensor):
            return logits, loss
    tensors = (
        [item for item in output if isinstance(item, Tensor)] if isinstance(output, (tuple, list)) else []
    )
    if not tensors:
        raise RingVerifyError(
            f"verify_first_batch: expected logits or a tensor as the model's output, got"
            f" {type(output).__name__}; set verify_first_batch to false"
        )
    return max(tensors, key=lambda item: item.ndim), next((item for item in tensors if item.ndim == 0), None)


def hooked(one: Forward) -> Forward:
    """Record in the backward pass what the training loop made of the results."""

    def note(name: str) -> Callable[[Tensor], None]:
        def hook(gradient: Tensor) -> None:
            setattr(one, name, gradient.detach())

        return hook

    if one.loss is not None and one.loss.requires_grad:
        one.loss.register_hook(note("loss_factor"))
    if one.logits is not one.loss and one.logits.requires_grad:
        one.logits.register_hook(note("logits_gradient"))
    return one
