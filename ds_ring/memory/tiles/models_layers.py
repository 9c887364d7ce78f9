"""Tiled MLPs and norms: what "tiled_mlp" of the JSON's "long_sequence" does to a model."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from deepspeed.utils import set_z3_leaf_module
from torch import Tensor, nn
from transformers import PreTrainedModel

from ds_ring.data.session import RingSession
from ds_ring.errors import RingConfigError
from ds_ring.memory.tiles.keys import ChunkChoice, get_chunk_tokens
from ds_ring.memory.tiles.tiled_call import tiled_call
from ds_ring.models.model import TABLE
from ds_ring.models.model_part import ModelPart
from ds_ring.patches import apply, patch

log = logging.getLogger(__name__)
_KEY = "long_sequence.tiled_mlp"

_tiles_layer = patch(
    TABLE.given("layer", "torch.nn.Module"), "forward", stage="around_forward", kind="replaced",
    feature="tiled layers", when=_KEY,
    reason="calls the original tile by tile; MLPs also get deepspeed.utils.set_z3_leaf_module",
)  # fmt: skip


class TiledMLPs(ModelPart):
    """Compute MLPs and norms in tiles, where the JSON asks for it."""

    def install(self) -> None:
        """Apply the patches of modules inside the model; `off` leaves them, and they ask the session."""
        for module, forward in tiled_layers(self.model, self.session).items():
            apply(_tiles_layer.to(forward), session=self.session, layer=module)


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
    choice = session.config.long_sequence.tiled_mlp
    if choice is False:
        return {}
    why_not = "it has no module that is known for one"
    mlps: list[nn.Module] = []  # the outermost modules that are MLPs, or the experts of a mixture
    inside: set[nn.Module] = set()
    for module in model.modules():
        if module not in inside and (
            _is_mlp(module) or (type(module).__name__.endswith(_EXPERTS) and len(_arguments(module)) == 3)
        ):
            inside.update(module.modules())
            mlps.append(module)
    dropping = [
        type(mlp).__name__
        for mlp in mlps
        if any(isinstance(part, nn.Dropout) and part.p > 0 for part in mlp.modules())
    ]
    if dropping:
        mlps, why_not = [], f"{dropping[0]} has a dropout, which a second run would draw anew: set it to 0"
    if not mlps:
        if choice != "auto":
            raise RingConfigError.wrong(_KEY, "MLPs on single tokens", f"none: {why_not}", 'set it to "auto"')
        log.info('tiled_mlp "auto": the MLPs of %s stay whole: %s', type(model).__name__, why_not)
        return {}
    widest = max(map(_widest, mlps))
    tiled = {
        module: _TiledModule(module, choice, session, widest).forward for module in _norms(model, inside)
    }
    for module in mlps:
        tiled[module] = _TiledModule(module, choice, session, _widest(module)).forward
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
    return [parameter for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]


def _takes_one(module: nn.Module) -> bool:
    return [parameter.default for parameter in _arguments(module)].count(inspect.Parameter.empty) == 1


class _TiledModule:
    """Run one module tile by tile."""

    def __init__(self, module: nn.Module, choice: ChunkChoice, session: RingSession, width: int) -> None:
        self._module, self._asked, self._session = module, choice, session
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
                raise RingConfigError.wrong(
                    _KEY, f"{name} called with tensors [..., tokens, width]", "others", 'set it to "auto"'
                )
            _say_once(name)
            return self._plain(*args, **kwargs)
        experts_of_a_token = inputs[1].shape[-1] if len(inputs) > 1 else 1
        tile = get_chunk_tokens(self._asked, self._width * experts_of_a_token, inputs[0].device.type)
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
    return [tuple(getattr(parameter, "ds_shape", parameter.shape)) for parameter in module.parameters()]


@functools.lru_cache(maxsize=256)
def _say_once(name: str) -> None:
    log.warning('tiled_mlp "auto": %s is called with other things than tokens, and stays whole', name)
