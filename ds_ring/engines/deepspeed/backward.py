"""Divide gradients by the accumulated steps once, and see each backward pass that DeepSpeed does not see.

Owns what versions of DeepSpeed do otherwise between a loss and its gradients (`compat/deepspeed.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ds_ring.compat.deepspeed import DIVIDES_OUTPUTS, KEEPS_LAST_MICRO_BATCH, SEES_DIRECT_BACKWARD
from ds_ring.data.engine import DEEPSPEED, ENGINE
from ds_ring.errors import RingConfigError
from ds_ring.patches import apply, patch

_DIRECT = "this version of DeepSpeed does not see a direct loss.backward(), and reduces no gradients: raises"
_checks_call = patch(
    DEEPSPEED.given("tensor", "torch.Tensor"), stage="in_backward", feature="direct_backward", reason=_DIRECT
)
_TWICE = "this version of DeepSpeed divides the gradients of a loss and of its logits: once"


class UnseenBackward:
    """Refuse a backward pass outside `engine.backward`, which DeepSpeed would not see."""

    def __init__(self, session: Any) -> None:
        self._session, self._is_inside = session, False

    @patch(
        ENGINE, "backward", stage="around_backward", feature="direct_backward", reason=_DIRECT,
        available=not SEES_DIRECT_BACKWARD,
    )  # fmt: skip
    def around_backward(self, backward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._is_inside = True
        try:
            return backward(*args, **kwargs)
        finally:
            self._is_inside = False

    @patch(
        ENGINE,
        stage="after_forward",
        feature="direct_backward",
        reason=_DIRECT,
        available=not SEES_DIRECT_BACKWARD,
    )
    def after_forward(self, _: Any, args: Any, kwargs: Any, output: Any) -> None:
        """Let each result of a forward pass raise in a backward pass that is not the engine's."""
        for x in tree_leaves(output) if torch.is_grad_enabled() else ():
            if isinstance(x, Tensor) and x.grad_fn is not None:
                apply(_checks_call.to(self._check), session=self._session, tensor=x)

    def _check(self, _: Tensor) -> None:
        if not self._is_inside:
            raise RingConfigError(
                "loss.backward(): expected engine.backward(loss), got a direct call, of which DeepSpeed"
                " before 0.18.3 reduces no gradients; call the engine's, or install a later version"
            )


class DividedOnce:
    """Divide the loss by the accumulated steps, and not the gradients of each output."""

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self._engine = engine

    @patch(
        ENGINE, "backward", stage="around_backward", feature="accumulation", reason=_TWICE,
        when="gradients are accumulated", available=DIVIDES_OUTPUTS,
    )  # fmt: skip
    def around_backward(
        self,
        backward: Callable[..., Any],
        loss: Tensor,
        retain_graph: bool = False,
        scale_wrt_gas: bool = True,
    ) -> Any:
        share = loss / self._engine.gradient_accumulation_steps() if scale_wrt_gas else loss
        return backward(share, retain_graph=retain_graph, scale_wrt_gas=False)

    @patch(
        ENGINE, "_backward_prologue_per_tensor", stage="around_backward", kind="replaced",
        feature="accumulation.outputs", reason=_TWICE, when="gradients are accumulated",
        available=DIVIDES_OUTPUTS,
    )  # fmt: skip
    def divide(self, grad: Tensor | None) -> Tensor | None:
        """Return the gradient of an output, divided in a direct `loss.backward()`."""
        is_divided = grad is None or self._engine._running_engine_backward
        return grad if is_divided else grad / self._engine.gradient_accumulation_steps()


@patch(
    DEEPSPEED.given("engine.optimizer", "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer"),
    "independent_gradient_partition_epilogue", stage="around_backward", feature="accumulation.sum",
    reason="this version of DeepSpeed keeps the gradients of the last micro-batch alone: of all",
    when="ZeRO 2 accumulates gradients", available=KEEPS_LAST_MICRO_BATCH,
)  # fmt: skip
def keep_micro_batches(engine: DeepSpeedEngine, finish: Callable[[], None]) -> None:
    """Let the end of a backward pass add its gradients to those of earlier micro-batches."""
    sums, averages = engine.optimizer.all_grad_tensors, engine.optimizer.averaged_gradients
    groups = [group for group, tensors in sums.items() if tensors is not None]
    averages.update((group, sums[group]) for group in groups)  # anything but None: then it adds
    finish()
    averages.update((group, None) for group in groups if sums[group] is not None)  # not at the boundary
