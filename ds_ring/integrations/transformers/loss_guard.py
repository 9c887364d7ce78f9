"""Guard a model's loss function: no mean over local tokens, no term that each rank computes of its own.

Owns the checks of a loss that a transformers model computes itself. What such a loss must be is loss.py's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ds_ring.errors import RingConfigError, RingShapeError
from ds_ring.integrations.transformers.checks import THROUGH_SHARD_BATCH

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_FUSED = "FusedCausalLMOutput"  # trl.trainer.utils


class LossGuard:
    """Wrap a model's loss function, and refuse labels that were not shifted before they were sharded.

    Attributes:
        own: what the loss function returned in this forward pass; None before.
        scale: what the loss of a head that pools tokens is multiplied by, since every rank computes all of it
            ([Note: gradient of what all ranks compute] in sequence_sum.py); None for a loss of tokens.
    """

    def __init__(self, loss_function: Callable[..., Tensor], scale: float | None = None) -> None:
        self.loss_function = loss_function
        self.own: Tensor | None = None
        self.scale = scale
        self._expected: tuple[Tensor, int] | None = None
        self._divides = False

    def start(self, items: object = None) -> None:
        """Drop the loss of the forward pass before; `items` is num_items_in_batch of this one."""
        self.own = self._expected = None
        self._divides = items is not None

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        if self.scale is not None and kwargs.get("pooled_logits") is not None:
            self.own = self.loss_function(*args, **kwargs) * self.scale
            return self._given(self.own)
        for key in ("shift_labels", "num_items_in_batch"):
            if kwargs.get(key) is None:
                raise RingShapeError(
                    f"loss: expected {key} beside labels, got none: it would be a mean over this rank's"
                    f" tokens, its labels shifted across a cut; {THROUGH_SHARD_BATCH}. A head that labels"
                    " each token with its own class (token classification) takes no labels from shard_batch,"
                    ' which shifts them: call it without, give the batch "shift_labels", aligned with the'
                    " tokens, and take engine.ring.loss(output.logits, batch).backward_loss"
                )
        self.own = self.loss_function(*args, **kwargs)
        return self._given(self.own)

    def _given(self, loss: Tensor) -> Tensor:
        """Return a copy for the model, which may add to it in place."""
        copy = loss.clone()
        self.expect(copy)
        return copy

    def expect(self, loss: Tensor) -> None:
        """Take `loss` for the model's whole loss."""
        self._expected = (loss, 0 if torch.compiler.is_compiling() else loss._version)

    def check(self, model: PreTrainedModel, output: Any) -> None:
        """Refuse a loss that the model computed by itself: it cannot know the tokens of other ranks."""
        loss = getattr(output, "loss", None)
        # TRL's head takes shift_labels and num_items_in_batch, and computes what a loss function would.
        if loss is None or (type(output).__name__ == _FUSED and self._divides):
            return
        how = "by itself and not by its loss_function" if self._expected is None else ""
        if self._expected is not None and not torch.compiler.is_compiling():
            expected, version = self._expected
            if loss is not expected or loss._version != version:
                how = "and added a term to it that each rank would compute of its own tokens"
        if how:
            raise RingConfigError(
                f"{type(model).__name__} computed a loss {how}; call it without labels, and take"
                " engine.ring.loss(output.logits, batch).backward_loss"
            )
