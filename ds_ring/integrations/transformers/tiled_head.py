"""Give a causal language model a head whose logits are computed in tiles, with the loss.

Owns when that is done, and what of a model must be as it is: the head is a Linear, and the loss is that of
transformers' causal models. What stands for the logits is deferred_logits.py's, the loss tiled_loss.py's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss

from ds_ring.config.long_sequence_section import tile_tokens
from ds_ring.errors import RingConfigError
from ds_ring.integrations.deepspeed.session import RingSession
from ds_ring.runtime.deferred_logits import DeferredLogits, Job

log = logging.getLogger(__name__)

Loss = Callable[..., Tensor]


def tile_loss(model: PreTrainedModel, session: RingSession) -> list[RemovableHandle]:
    """Replace the head's forward and the loss function of `model`, where the JSON asks for it.

    Raises:
        RingConfigError: the JSON asks for it by name, and the model has another head or loss.
    """
    asked = session.config.long_sequence.tiled_loss
    if asked is False:
        return []
    why_not = _why_not(model)
    if why_not is not None:
        if asked != "auto":
            raise RingConfigError(
                f'{type(model).__name__}: long_sequence.tiled_loss: {why_not}; set it to false or "auto"'
            )
        log.info('tiled_loss "auto": %s computes its logits at once: %s', type(model).__name__, why_not)
        return []
    head = model.get_output_embeddings()
    assert isinstance(head, nn.Linear)
    tile = tile_tokens(asked, head.out_features, session.device.type)
    tiled = _TiledHead(head, tile, strict=asked != "auto")
    head.forward = tiled.forward  # type: ignore[method-assign, assignment]
    model.loss_function = tiled.loss_function(model.loss_function)
    return tiled.watch(model, session)


def _why_not(model: PreTrainedModel) -> str | None:
    """Return why the model's loss cannot be tiled; None if it can."""
    head = model.get_output_embeddings()
    if head is None:
        return "it has no language model's head (get_output_embeddings is None)"
    if type(head) is not nn.Linear:
        return f"expected a torch.nn.Linear as its head, got {type(head).__name__}"
    loss = getattr(model.loss_function, "loss_function", model.loss_function)
    if loss is not ForCausalLMLoss:
        name = getattr(loss, "__name__", type(loss).__name__)
        return f"expected the loss of causal language models, ForCausalLMLoss, got {name}"
    return None


class _TiledHead:
    """Hold back the logits of one model's head while its loss will be asked for.

    Attributes:
        deferring: whether the forward pass that is running wants a loss (labels, or training without any).
    """

    def __init__(self, head: nn.Linear, tile: int, strict: bool) -> None:
        self._head, self._tile, self._strict = head, tile, strict
        self._plain = head.forward
        self.deferring = False

    def forward(self, hidden: Tensor, job: Job | None = None) -> Any:
        """Return logits, what stands for them, or what a job makes of the whole weight."""
        # A job comes in by the module's call: at ZeRO 3 its hooks make the weight whole meanwhile.
        if job is not None:
            return job(hidden, self._head.weight, self._head.bias)
        if not self.deferring:
            return self._plain(hidden)
        return DeferredLogits(hidden, self._call, self._tile, self._head.out_features, self._strict)

    def _call(self, hidden: Tensor, job: Job) -> Tensor:
        made: Tensor = self._head(hidden, job=job)
        return made

    def loss_function(self, plain: Loss) -> Loss:
        """Return the model's loss function, for logits that are held back and for those that are not."""

        def loss(logits: Any, labels: Tensor | None = None, *args: Any, **kwargs: Any) -> Tensor:
            if not isinstance(logits, DeferredLogits):
                if self.deferring and self._strict:
                    raise RingConfigError(
                        "long_sequence.tiled_loss: expected the loss of what get_output_embeddings() gives,"
                        f" got logits {list(logits.shape)} that were computed at once: this model does not"
                        " call its head, or changes what it gives; set it to false"
                    )
                return plain(logits, labels, *args, **kwargs)
            return logits.loss(kwargs["shift_labels"], kwargs["num_items_in_batch"])  # there: loss_guard.py

        return loss

    def watch(self, model: PreTrainedModel, session: RingSession) -> list[RemovableHandle]:
        """Find out before each forward pass whether it wants a loss; return the hooks' handles."""

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            trains = model.training and torch.is_grad_enabled()
            wanted = trains or kwargs.get("labels") is not None
            if wanted and torch.compiler.is_compiling():
                if self._strict:
                    raise RingConfigError(
                        "long_sequence.tiled_loss: expected a model that is not compiled, got torch.compile:"
                        ' its graph has the logits as a whole; set it to "auto" or false'
                    )
                wanted = False
            self.deferring = wanted and not session.batches.is_off

        def after(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            self.deferring = False

        return [
            model.register_forward_pre_hook(before, with_kwargs=True),
            model.register_forward_hook(after, always_call=True),
        ]
