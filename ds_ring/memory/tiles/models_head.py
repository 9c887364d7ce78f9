"""Tiled logits: what "tiled_loss" of the JSON's "long_sequence" does to a model.

The head must be a Linear, and the loss that of transformers' causal models.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ds_ring.data.session import RingSession
from ds_ring.errors import RingConfigError
from ds_ring.memory.tiles.deferred_logits import DeferredLogits, HeadFunction
from ds_ring.memory.tiles.keys import get_chunk_tokens
from ds_ring.models.model import MODEL, TABLE
from ds_ring.models.model_part import Loss, ModelPart
from ds_ring.patches import guard_imports, patch

log = logging.getLogger(__name__)

_KEY = "long_sequence.tiled_loss"
_loss_patch = partial(patch, feature="tiled loss", when=_KEY)
_defers_logits = _loss_patch(
    TABLE.given("head", "torch.nn.Linear"), "forward", stage="around_forward", kind="replaced",
    reason="returns deferred logits",
)  # fmt: skip
_computes_loss = _loss_patch(
    MODEL, "loss_function", stage="around_loss", kind="replaced",
    reason="computes the loss of deferred logits, calls the original for others",
)  # fmt: skip
_wants_loss = _loss_patch(
    MODEL, stage="before_forward", reason="finds out whether the forward pass computes a loss"
)
_ends_deferring = _loss_patch(
    MODEL, stage="after_forward", reason="returns to plain logits", options=("always_call",)
)


class TiledLoss(ModelPart):
    """Compute logits and loss in tiles, where the JSON asks for it."""

    def __init__(self, model: PreTrainedModel, session: RingSession, rewritten: Callable[[], bool]) -> None:
        super().__init__(model, session, rewritten)
        self._head = tiled_head(model, session)

    def loss_function(self, plain: Loss) -> Loss:
        """Return a loss function that takes deferred logits, too."""
        return plain if self._head is None else self._head.loss_function(plain)

    def patches(self, loss: Loss) -> list[Any]:
        """Return the patches of the head and of the model, whose loss function becomes `loss`."""
        return [] if self._head is None else self._head.patches(self.model, self.session, loss)


def tiled_head(model: PreTrainedModel, session: RingSession) -> TiledHead | None:
    """Return the tiled head and loss of `model`, where the JSON asks for it.

    Raises:
        RingConfigError: the JSON asks for it by name, and the model has another head or loss.
    """
    choice = session.config.long_sequence.tiled_loss
    if choice is False:
        return None
    head, why_not = model.get_output_embeddings(), ""
    if head is None:
        why_not = "it has no language model's head (get_output_embeddings is None)"
    elif type(head) is not nn.Linear:
        why_not = f"expected a torch.nn.Linear as its head, got {type(head).__name__}"
    else:
        with guard_imports(_KEY, "transformers"):
            from transformers.loss.loss_utils import ForCausalLMLoss
        loss = getattr(model.loss_function, "loss_function", model.loss_function)
        if loss is not ForCausalLMLoss:
            name = getattr(loss, "__name__", type(loss).__name__)
            why_not = f"expected the loss of causal language models, ForCausalLMLoss, got {name}"
    if why_not:
        if choice != "auto":
            raise RingConfigError(f'{type(model).__name__}: {_KEY}: {why_not}; set it to "auto"')
        log.info('tiled_loss "auto": %s computes its logits at once: %s', type(model).__name__, why_not)
        return None
    return TiledHead(
        head, get_chunk_tokens(choice, head.out_features, session.device.type), strict=choice != "auto"
    )


class TiledHead:
    """Defer the logits of one model's head while its loss will be computed.

    Attributes:
        deferring: whether the forward pass that is running wants a loss (labels, or training without any).
    """

    def __init__(self, head: nn.Linear, tile: int, strict: bool) -> None:
        self._head, self._tile, self._strict = head, tile, strict
        self._plain = head.forward
        self.deferring = False

    def forward(self, hidden: Tensor, job: HeadFunction | None = None) -> Any:
        """Return logits, deferred logits, or the result of a job that gets the whole weight."""
        # A job comes in by the module's call: at ZeRO 3 its hooks gather the weight during the call.
        if job is not None:
            return job(hidden, self._head.weight, self._head.bias)
        if not self.deferring:
            return self._plain(hidden)
        return DeferredLogits(hidden, self._call, self._tile, self._head.out_features, self._strict)

    def _call(self, hidden: Tensor, job: HeadFunction) -> Tensor:
        result: Tensor = self._head(hidden, job=job)
        return result

    def loss_function(self, plain: Loss) -> Loss:
        """Return the model's loss function, for deferred logits and for others."""

        def loss(logits: Any, labels: Tensor | None = None, *args: Any, **kwargs: Any) -> Tensor:
            if not isinstance(logits, DeferredLogits):
                if self.deferring and self._strict:
                    raise RingConfigError.wrong(
                        _KEY, "logits by get_output_embeddings()", list(logits.shape), "set it to false"
                    )
                return plain(logits, labels, *args, **kwargs)
            return logits.loss(kwargs["shift_labels"], kwargs["num_items_in_batch"])  # there: families.py

        return loss

    def patches(self, model: PreTrainedModel, session: RingSession, loss: Loss) -> list[Any]:
        """Return the patches of the head and of the model, whose loss function becomes `loss`."""

        @_wants_loss
        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            trains = model.training and torch.is_grad_enabled()
            wanted = trains or kwargs.get("labels") is not None or session.batches.defers_logits
            if wanted and torch.compiler.is_compiling():
                if self._strict:
                    raise RingConfigError.wrong(
                        _KEY, "a model that is not compiled", "torch.compile", 'set it to "auto"'
                    )
                wanted = False
            self.deferring = wanted and not session.batches.is_off

        @_ends_deferring
        def after(*_: Any) -> None:
            self.deferring = False

        return [_defers_logits.to(self.forward), _computes_loss.to(loss), before, after]
