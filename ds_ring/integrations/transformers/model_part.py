"""One row of `registry.MODEL_PARTS`: what a capability adds to a transformers model on a ring.

`ModelAdapter.install` makes one object of each row for a model, and names none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from ds_ring.integrations.deepspeed.session import RingSession
from ds_ring.registry import MODEL_PARTS, load

Loss = Callable[..., Tensor]


class ModelPart:
    """One capability of one model; the methods of this class change nothing."""

    def __init__(self, model: PreTrainedModel, session: RingSession) -> None:
        self.model, self.session = model, session

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


def model_parts(model: PreTrainedModel, session: RingSession) -> list[ModelPart]:
    """Return an object of each row."""
    return [load(home)(model, session) for home in MODEL_PARTS.values()]
