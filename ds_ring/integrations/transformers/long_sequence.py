"""What the JSON's "long_sequence" does to a model: tiled logits, tiled MLPs, checkpoints on the host.

memory/tiled_call.py runs the tiles. Logits are tiled where the head is a Linear and the loss that of
transformers' causal models.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from deepspeed.utils import set_z3_leaf_module
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import PreTrainedModel

from ds_ring.config.section import TileChoice, tile_tokens
from ds_ring.errors import RingConfigError
from ds_ring.integrations.adapter import apply, imports_of, patch
from ds_ring.integrations.deepspeed.session import RingSession
from ds_ring.integrations.transformers.model import MODEL, PRETRAINED, TABLE
from ds_ring.memory.deferred_logits import DeferredLogits, HeadFunction
from ds_ring.memory.host_memory import LAYER_TENSORS, HostMemory
from ds_ring.memory.tiled_call import tiled_call

log = logging.getLogger(__name__)

Loss = Callable[..., Tensor]


def tiled_head(model: PreTrainedModel, session: RingSession) -> TiledHead | None:
    """Return the tiled head and loss of `model`, where the JSON asks for it.

    Raises:
        RingConfigError: the JSON asks for it by name, and the model has another head or loss.
    """
    asked = session.config.long_sequence.tiled_loss
    if asked is False:
        return None
    head, why_not = model.get_output_embeddings(), ""
    if head is None:
        why_not = "it has no language model's head (get_output_embeddings is None)"
    elif type(head) is not nn.Linear:
        why_not = f"expected a torch.nn.Linear as its head, got {type(head).__name__}"
    else:
        with imports_of("long_sequence.tiled_loss", "transformers"):
            from transformers.loss.loss_utils import ForCausalLMLoss
        loss = getattr(model.loss_function, "loss_function", model.loss_function)
        if loss is not ForCausalLMLoss:
            name = getattr(loss, "__name__", type(loss).__name__)
            why_not = f"expected the loss of causal language models, ForCausalLMLoss, got {name}"
    if why_not:
        if asked != "auto":
            raise RingConfigError(
                f'{type(model).__name__}: long_sequence.tiled_loss: {why_not}; set it to false or "auto"'
            )
        log.info('tiled_loss "auto": %s computes its logits at once: %s', type(model).__name__, why_not)
        return None
    return TiledHead(head, tile_tokens(asked, head.out_features, session.device.type), strict=asked != "auto")


tiles_layer = patch(
    TABLE.given("layer", "torch.nn.Module"), "forward", stage="around_forward", kind="replaced",
    feature="tiled layers", when="long_sequence.tiled_mlp",
    reason="calls the original tile by tile; MLPs also get deepspeed.utils.set_z3_leaf_module",
)  # fmt: skip
_loss_patch = partial(patch, feature="tiled loss", when="long_sequence.tiled_loss")
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
_offload_patch = partial(patch, when="long_sequence.offload_checkpoints")
_checks_checkpoints = _offload_patch(
    MODEL, stage="before_forward", feature="offloaded checkpoints",
    reason="checkpointing may have been switched on anew",
)  # fmt: skip
_offloads = _offload_patch(
    TABLE.given("checkpointed", PRETRAINED), "_gradient_checkpointing_func", stage="around_forward",
    kind="replaced", feature="offloaded checkpoints.layers",
    reason="calls the original under torch's saved_tensors_hooks, which keep tensors on the host",
)  # fmt: skip


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
        made: Tensor = self._head(hidden, job=job)
        return made

    def loss_function(self, plain: Loss) -> Loss:
        """Return the model's loss function, for deferred logits and for others."""

        def loss(logits: Any, labels: Tensor | None = None, *args: Any, **kwargs: Any) -> Tensor:
            if not isinstance(logits, DeferredLogits):
                if self.deferring and self._strict:
                    raise RingConfigError(
                        "long_sequence.tiled_loss: expected logits by get_output_embeddings(), got"
                        f" logits {list(logits.shape)} that were computed at once; set it to false"
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
                    raise RingConfigError(
                        "long_sequence.tiled_loss: expected a model that is not compiled, got"
                        ' torch.compile; set it to "auto" or false'
                    )
                wanted = False
            self.deferring = wanted and not session.batches.is_off

        @_ends_deferring
        def after(*_: Any) -> None:
            self.deferring = False

        return [_defers_logits.to(self.forward), _computes_loss.to(loss), before, after]


# Tiled are MLPs of one input, the experts of a mixture, and the norms of the residual stream: they treat
# tokens one by one. A whole mixture of experts is not: its router's results are read for the load balancing
# loss.

_MLPS = ("MLP", "FeedForward")  # what transformers' classes of one input end with
_EXPERTS = "Experts"  # of hidden states, and of each token's experts and their weights
_MIXES = ("Router", "Experts", "Attention", "Conv1d")  # in a module: it does more than an MLP does


def tiled_layers(model: PreTrainedModel, session: RingSession) -> dict[nn.Module, Callable[..., Any]]:
    """Return the tiled forward of each of the model's MLPs and norms, where the JSON asks for it.

    Raises:
        RingConfigError: the JSON asks for it by name, and the model has no MLP that can be tiled.
    """
    asked = session.config.long_sequence.tiled_mlp
    if asked is False:
        return {}
    why_not = "it has no module that is known for one"
    found: list[nn.Module] = []  # the outermost modules that are MLPs, or the experts of a mixture
    inside: set[nn.Module] = set()
    for module in model.modules():
        if module not in inside and (
            _is_mlp(module) or (type(module).__name__.endswith(_EXPERTS) and len(_arguments(module)) == 3)
        ):
            inside.update(module.modules())
            found.append(module)
    dropping = [
        type(one).__name__
        for one in found
        if any(isinstance(part, nn.Dropout) and part.p > 0 for part in one.modules())
    ]
    if dropping:
        found, why_not = [], f"{dropping[0]} has a dropout, which a second run would draw anew: set it to 0"
    if not found:
        if asked != "auto":
            raise RingConfigError(
                f"{type(model).__name__}: long_sequence.tiled_mlp: expected MLPs on single tokens, got none:"
                f' {why_not}; set it to false or "auto"'
            )
        log.info('tiled_mlp "auto": the MLPs of %s stay whole: %s', type(model).__name__, why_not)
        return {}
    widest = max(map(_widest, found))
    tiled = {module: _TiledModule(module, asked, session, widest).forward for module in _norms(model, inside)}
    for module in found:
        tiled[module] = _TiledModule(module, asked, session, _widest(module)).forward
        # At ZeRO 3 the module's own hooks gather all its weights once; its children's would for every tile.
        set_z3_leaf_module(module, True)
    return tiled


def _norms(model: PreTrainedModel, inside: set[nn.Module]) -> Iterator[nn.Module]:
    """Find the norms of the residual stream: a norm of q or k has the width of a head, and is left."""
    width = model.config.get_text_config().hidden_size
    for module in model.modules():
        is_norm = type(module).__name__.endswith("Norm") and module not in inside
        if is_norm and set(_shapes(module)) == {(width,)} and _takes_one(module):
            yield module


def _is_mlp(module: nn.Module) -> bool:
    name = type(module).__name__
    parts = {type(part).__name__ for part in module.modules()} - {name}
    return (
        name.endswith(_MLPS)
        and _takes_one(module)
        and any(True for _ in module.parameters())
        and not any(part.endswith(_MIXES) for part in parts)
    )


def _arguments(module: nn.Module) -> list[inspect.Parameter]:
    parameters = inspect.signature(module.forward).parameters.values()
    return [one for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD]


def _takes_one(module: nn.Module) -> bool:
    return [one.default for one in _arguments(module)].count(inspect.Parameter.empty) == 1


class _TiledModule:
    """Run one module tile by tile."""

    def __init__(self, module: nn.Module, asked: TileChoice, session: RingSession, width: int) -> None:
        self._module, self._asked, self._session = module, asked, session
        self._plain = module.forward
        self._width = width  # of the widest row inside: elements

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the module returns."""
        if self._session.batches.is_off or torch.compiler.is_compiling():
            return self._plain(*args, **kwargs)
        bound = inspect.signature(self._plain).bind(*args, **kwargs).arguments
        inputs = [value for value in bound.values() if value is not None]
        leading = inputs[0].shape[:-1]
        if not all(isinstance(value, Tensor) and value.shape[:-1] == leading for value in inputs):
            name = type(self._module).__name__
            if self._asked != "auto":
                raise RingConfigError(
                    f"long_sequence.tiled_mlp: expected {name} to be called with tensors [..., tokens,"
                    ' width], got others; set it to "auto" or false'
                )
            _say_once(name)
            return self._plain(*args, **kwargs)
        experts_of_a_token = inputs[1].shape[-1] if len(inputs) > 1 else 1
        tile = tile_tokens(self._asked, self._width * experts_of_a_token, inputs[0].device.type)
        if leading.numel() <= tile:
            return self._plain(*args, **kwargs)
        return tiled_call(self._plain, inputs, list(self._module.parameters()), tile)


def _widest(module: nn.Module) -> int:
    """Return the elements of the widest row that a token has in a module."""
    shapes = _shapes(module)
    if type(module).__name__.endswith(_EXPERTS):
        shapes = [shape[1:] for shape in shapes]
    return max(max(shape) for shape in shapes if shape)


def _shapes(module: nn.Module) -> list[tuple[int, ...]]:
    # ds_shape: at ZeRO 3 a parameter that is not gathered has no shape of its own.
    return [tuple(getattr(one, "ds_shape", one.shape)) for one in module.parameters()]


@functools.cache
def _say_once(name: str) -> None:
    log.warning('tiled_mlp "auto": %s is called with other things than tokens, and stays whole', name)


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
    asked = session.config.long_sequence.offload_checkpoints
    if asked is False or (asked == "auto" and session.device.type == "cpu"):
        return None
    name = type(model).__name__
    if not model.supports_gradient_checkpointing:
        if asked != "auto":
            raise RingConfigError(
                f"{name}: long_sequence.offload_checkpoints: expected layers that can be checkpointed, got"
                ' a model that does not support it; set it to false or "auto"'
            )
        log.info('offload_checkpoints "auto": %s does not support checkpointing', name)
        return None
    if not model.is_activation_checkpointing:
        log.info("%s: its layers are checkpointed from now on (long_sequence.offload_checkpoints)", name)
        model.activation_checkpointing_enable({"use_reentrant": False})
    memory = session.mesh.owners[HostMemory]
    memory.enabled = True
    # A layer's input alone where all of attention is run again: more would occupy the device for nothing.
    memory.ahead = 1 if session.config.recompute_attention is True else LAYER_TENSORS

    @_checks_checkpoints
    def before(*_: Any) -> None:  # in each pass: it may have been switched on anew, without ours
        for module in model.modules():
            function = vars(module).get(_FUNCTION)
            if function is not None and not isinstance(function, _Offloading):
                inner = getattr(function, "func", function)
                if getattr(inner, "__module__", "").startswith("deepspeed."):
                    raise RingConfigError(
                        "long_sequence.offload_checkpoints: expected torch's checkpoints, got DeepSpeed's;"
                        ' use "activation_checkpointing": {"cpu_checkpointing": true} instead'
                    )
                apply(_offloads.to(_Offloading(function, memory)), session=session, checkpointed=module)

    return before
