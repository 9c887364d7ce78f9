"""What differs between versions of DeepSpeed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from deepspeed.runtime import engine, utils
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import nn

_ENGINE = engine.DeepSpeedEngine
# Until 0.18.2 it takes the loss, and is called by engine.backward only: a direct loss.backward() is not seen.
_PROLOGUE = getattr(_ENGINE, "_backward_prologue", None)
SEES_DIRECT_BACKWARD = _PROLOGUE is not None and "loss" not in inspect.signature(_PROLOGUE).parameters
# From 0.18.3 on each output's gradient is divided by the accumulated steps, so those of a loss and of logits
# that it was made of twice, at ZeRO 0, 1 and 2. Later `engine.backward` divides the loss instead, and marks
# the graph.
DIVIDES_OUTPUTS = SEES_DIRECT_BACKWARD and not hasattr(engine, "_ENGINE_BACKWARD_GRAPH_TRACKER")
# From 0.17 to 0.18.2 ZeRO 2 keeps the gradients of the last of the accumulated micro-batches alone.
KEEPS_LAST_MICRO_BATCH = (
    not SEES_DIRECT_BACKWARD
    and "all_grad_tensors" in DeepSpeedZeroOptimizer.independent_gradient_partition_epilogue.__code__.co_names
)
# Of a backward pass under way; None where SEES_DIRECT_BACKWARD is false.
count_used_parameters: Callable[[Sequence[nn.Parameter]], int] | None = getattr(
    utils, "count_used_parameters_in_backward", None
)


def writes_decoupled(checkpoint_engine: Any) -> bool:
    """Return whether another process writes the checkpoints; none does before 0.17."""
    return hasattr(checkpoint_engine, "is_decoupled") and bool(checkpoint_engine.is_decoupled())
