"""One row of `plugin.MODEL_PARTS`: what a capability adds to a transformers model on a ring.

`ModelAdapter.install` makes one object of each row for a model, and names none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from ds_ring.data.batch_sharding import BatchSharding
from ds_ring.data.session import RingSession
from ds_ring.plugin import MODEL_PARTS, load_available

Loss = Callable[..., Tensor]


class ModelPart:
    """One capability of one model; the methods of this class change nothing.

    Attributes:
        model, session: the model, and the session of its ring.
        rewritten: whether torch.compile's backend "ds_ring" has rewritten the model's attention by now.
        sharding: of the forward pass under way, if this part runs it in place of a batch; None for a batch.
    """

    sharding: BatchSharding | None = None

    def __init__(self, model: PreTrainedModel, session: RingSession, rewritten: Callable[[], bool]) -> None:
        self.model, self.session, self.rewritten = model, session, rewritten

    def install(self) -> None:
        """Apply the patches of modules inside the model.

        Raises:
            RingConfigError: the JSON asks for what the model does not allow.
        """

    def loss_function(self, plain: Loss) -> Loss:
        """Return the loss function that the model gets in place of `plain`."""
        return plain

    def patches(self, loss: Loss) -> list[Any]:
        """Return the patches of the model itself, whose loss function becomes `loss`."""
        return []

    def after(self, output: Any) -> None:
        """See the output of a forward pass that this part runs."""

    def own(self) -> list[Any]:
        """Return the patches that give the model back what is its own, for `engine.ring.off()`."""
        return []


def make_model_parts(
    model: PreTrainedModel, session: RingSession, rewritten: Callable[[], bool]
) -> list[ModelPart]:
    """Return an object of each row."""
    return [part(model, session, rewritten) for part in load_available(MODEL_PARTS)]
