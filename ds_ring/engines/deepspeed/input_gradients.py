"""Gradients of what a model is given: embeddings, perturbations of them, modules outside of the engine.

A rank's loss is weighed for parameters, whose gradients the engine sums over all ranks ([Note: gradient
scale] in loss.py). No engine sums those of a tensor that comes from outside. Owns what makes them right for
the whole tensors of a batch, and what refuses them for tensors of this rank's tokens.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ds_ring.comm.collective import collective
from ds_ring.compat.deepspeed import SEES_DIRECT_BACKWARD, count_used_parameters
from ds_ring.data.engine import DEEPSPEED, ENGINE
from ds_ring.data.whole_gradients import needs_gradient, whole_nodes
from ds_ring.errors import RingConfigError
from ds_ring.patches import apply, patch

_INSTEAD = (
    "give engine.ring.shard_batch the whole tensor [samples, tokens, ...], which requires gradients, call"
    " engine.backward(loss), and read the gradient of the whole tensor, or of what made it"
)
_REASON = "gradients of what a model is given are those of this rank's part of the loss: raises"
_checks_retained = patch(
    DEEPSPEED.given("tensor", "torch.Tensor"), stage="in_backward", feature="input_gradients", reason=_REASON,
)  # fmt: skip


class InputGradients:
    """Refuse gradients of tensors of this rank's tokens, which are no parameters of the engine."""

    def __init__(self, session: Any, engine: DeepSpeedEngine) -> None:
        self._session, self._engine = session, engine

    @patch(ENGINE, stage="before_forward", feature="input_gradients", reason=_REASON)
    def before_forward(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse tensors by token whose gradient leads out of the engine's model."""
        arguments = {**{str(number): x for number, x in enumerate(args)}, **kwargs}
        inputs = {name: x for name, x in arguments.items() if needs_gradient(x)}
        if not inputs or not self._is_at_work():
            return
        parameters = {id(parameter) for parameter in self._engine.module.parameters()}
        with collective(self._session.run_mesh, "gradients of inputs"):
            for name, x in inputs.items():
                leads_out = (
                    x.grad_fn is None or x.retains_grad or any(leaf not in parameters for leaf in _leaves(x))
                )
                if leads_out:
                    raise RingConfigError(
                        f"{name}: expected a tensor from engine.ring.shard_batch, or one that parameters of"
                        f" the engine's model alone have made, got {list(x.shape)} of this rank's tokens"
                        f" whose gradient is read elsewhere, and would be that of this rank's part;"
                        f" {_INSTEAD}"
                    )

    @patch(ENGINE, stage="after_forward", feature="input_gradients", reason=_REASON)
    def after_forward(self, _: Any, args: Any, kwargs: Any, output: Any) -> None:
        """Let hidden states and logits raise in a backward pass that would leave them a gradient."""
        for x in tree_leaves(output) if torch.is_grad_enabled() and self._is_at_work() else ():
            if isinstance(x, Tensor) and x.ndim > 1 and x.grad_fn is not None:
                apply(_checks_retained.to(_refuse_to_retain(weakref.ref(x))), session=self._session, tensor=x)

    def _is_at_work(self) -> bool:
        return self._session.run_mesh.sequence_size > 1 and not self._session.batches.is_off

    @patch(
        ENGINE, "_backward_prologue", stage="around_backward", feature="input_gradients",
        reason=_REASON, available=SEES_DIRECT_BACKWARD,
    )  # fmt: skip
    def around_prologue(self, prologue: Callable[[], None]) -> None:
        """Refuse torch.autograd.grad(loss, x), but for x of a batch that was given whole."""
        engine, executes = self._engine, torch._C._will_engine_execute_node
        direct = not engine._running_engine_backward and engine._support_torch_style_backward
        if direct and self._session.run_mesh.sequence_size > 1 and torch._C._current_graph_task_id() != -1:
            trained = [parameter for parameter in engine.module.parameters() if parameter.requires_grad]
            if trained and count_used_parameters is not None and count_used_parameters(trained) == 0:
                whole = any(executes(node) for node in list(whole_nodes))
                fails = engine.zero_optimization_stage() in (1, 2)  # in an IndexError of DeepSpeed's
                if fails or not whole:
                    why = (
                        "which DeepSpeed cannot do at ZeRO 1 and 2" if whole else "of which a rank has a part"
                    )
                    raise RingConfigError(
                        "torch.autograd.grad: expected gradients of parameters, got a call for other tensors,"
                        f" {why}; {_INSTEAD}"
                    )
        prologue()


def _refuse_to_retain(result: weakref.ref[Tensor]) -> Callable[[Tensor], None]:
    def check(_: Tensor) -> None:
        x = result()
        if x is not None and x.retains_grad:
            raise RingConfigError(
                "retain_grad: expected none on results of a forward pass, got one on a tensor"
                f" {list(x.shape)}, whose gradient would be that of this rank's part alone; {_INSTEAD}"
            )

    return check


def _leaves(x: Tensor) -> Iterator[int]:
    """Yield the identities of the leaves behind a tensor, without those of batches that were given whole."""
    nodes, seen = [x.grad_fn], set[Any]()
    while nodes:
        node: Any = nodes.pop()
        if node is None or node in seen or node in whole_nodes:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield id(node.variable)
        nodes += [inner for inner, _ in node.next_functions]
