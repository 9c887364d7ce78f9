"""Which layers of a model are recurrent, and what a ring patches in them: the table's row.

A layer is recurrent if its forward calls a function of `FUNCTIONS`, if its class has a method of `METHODS`,
or if it has a module that shifts or convolves tokens by itself.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import lru_cache, partial
from types import ModuleType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from torch import nn
from transformers import PreTrainedModel

from ds_ring.contrib.families.recurrent import functions, methods, scan
from ds_ring.data.batch import SHARDING
from ds_ring.errors import RingConfigError
from ds_ring.models.checks import get_layers
from ds_ring.models.model import TABLE
from ds_ring.models.variant import (
    CONVOLUTION,
    POSITIONS,
    STATE,
    AttachRequest,
    Variant,
)
from ds_ring.patches import apply, patch

if TYPE_CHECKING:
    from ds_ring.models.model_adapter import ModelAdapter

# Functions of modeling files, and methods of layers, with what a ring runs around them.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": functions.convolution,
    "torch_chunk_gated_delta_rule": functions.delta_rule,
    "chunk_kimi_delta_attention": functions.delta_rule,
    "mamba2_chunk_scan": functions.mamba2,
    "mamba_selective_scan": functions.mamba1,
    "mamba2_split_conv1d_scan_combined": functions.not_fused,
    "mamba_inner_fn": functions.not_fused,
    "rwkv_linear_attention": methods.wkv,
}
METHODS: dict[str, Callable[..., Any]] = {
    "MiniMaxLightningAttention.forward": methods.lightning_attention,
    "RecurrentGemmaRglru._rnn_scan": methods.rg_lru,
    "ZayaCCAProjection.forward": methods.compressed_convolution,
    "xLSTMBackend.forward": methods.mlstm,
    "RwkvSelfAttention.extract_key_value": partial(methods.rwkv_shift, place=1),
    "RwkvFeedForward.forward": partial(methods.rwkv_shift, place=0),
    "Qwen4ExpTextNGramEmbedding.forward": methods.ngrams,
    "Inkling2DynamicShortConvolution.forward": methods.dynamic_convolution,
    "Inkling2LoopDynamicShortConvolution.forward": methods.dynamic_convolution,
}
WRAPPERS = FUNCTIONS | METHODS
# Whose wrappers compute the state after a prompt, or whose layer keeps what they read in a cache.
_GIVES_STATES = WRAPPERS.keys() - {
    "Qwen4ExpTextNGramEmbedding.forward", "Inkling2DynamicShortConvolution.forward",
    "Inkling2LoopDynamicShortConvolution.forward",
}  # fmt: skip
# Their last inputs, by themselves.
_KEEPS_INPUTS = {"RecurrentGemmaRecurrentBlock", "RwkvSelfAttention", "RwkvFeedForward"}
# Of models whose states are objects of their own, which their layers get in place of a cache.
_OWN_STATES = {"rwkv_linear_attention", "xLSTMBackend.forward"}
# nn.Conv1d modules that are called by themselves, by the class that has them.
_CONVOLUTIONS = {"RecurrentGemmaRecurrentBlock": "conv_1d", "Qwen4ExpTextPLELayer": "conv1d"}
# Words of `layer_types` that are recurrent if every such layer is.
_LAYER_TYPES = {"linear_attention", "conv", "hybrid", "hybrid_sliding"}
# Wrappers of these call modules inside them as often as the batch asks, which differs by rank. As a leaf of
# ZeRO 3 the layer gathers their weights once. Qwen 4's n-gram embedding itself takes whole numbers, with
# which a leaf's backward pass fails.
_LEAVES = ("ZayaCCAProjection", "Qwen4ExpTextPLELayer")
# Names of functions that are wrapped in a modeling file: they stay, and call the original without a ring.
_wrapped_of_file: WeakKeyDictionary[ModuleType, set[str]] = WeakKeyDictionary()

_patches = {
    name: patch(
        TABLE.given(f"modeling.{name}".rpartition(".")[0]), name.rpartition(".")[2], stage="around_call",
        feature=f"recurrence.{name}", when="a layer of the model calls it",
        reason="adds what comes from tokens on other ranks; calls the original for other models",
    )
    for name in WRAPPERS
}  # fmt: skip
_layer_patch = partial(
    patch, TABLE.given("recurrent", "torch.nn.Module"), feature="recurrence",
    when="the layer calls a function of the rows above",
)  # fmt: skip
_before_layer = _layer_patch(
    stage="before_forward", reason="gives the functions that the layer calls the sharding of the batch"
)
_after_layer = _layer_patch(stage="after_forward", reason="ends that", options=("always_call",))
_module_patch = partial(
    patch, stage="around_call", reason="takes tokens from other ranks; calls the original without a ring"
)
_module_patches = {
    "shift": _module_patch(
        TABLE.given("shift", "torch.nn.ZeroPad2d"), "forward", feature="recurrence.shift",
        when="a layer shifts its tokens by one (RWKV)",
    ),
    "convolution": _module_patch(
        TABLE.given("convolution", "torch.nn.Conv1d"), "forward", feature="recurrence.convolution",
        when="a layer calls an nn.Conv1d (Recurrent Gemma, Qwen 4)",
    ),
}  # fmt: skip


class Recurrent(Variant):
    """Layers that pass a state on, or look back a few tokens."""

    def matches(self, module: nn.Module) -> bool:
        return is_recurrent(module)

    def refuse(self, model: PreTrainedModel, request: AttachRequest) -> None:
        layout = request.config.layout
        if layout in ("striped", "residue") and any(map(is_recurrent, model.modules())):
            raise RingConfigError.wrong(
                type(model).__name__, "shards of consecutive tokens", f'"{layout}"', 'use "zigzag"'
            )

    def covers(self, model: PreTrainedModel, as_is: bool) -> set[str]:
        layers = get_layers(model)
        parts = [part for layer in layers for part in layer.modules()]
        covered = set() if any(map(convolves_locally, parts)) else {CONVOLUTION}
        if not any(map(is_recurrent, model.modules())):
            return covered
        of_types: dict[str, list[nn.Module]] = {}
        for type_, layer in zip(getattr(model.config, "layer_types", None) or (), layers, strict=False):
            of_types.setdefault(type_, []).append(layer)
        covered |= {
            layer_type
            for layer_type in _LAYER_TYPES
            if all(any(map(is_recurrent, layer.modules())) for layer in of_types.get(layer_type, [model]))
        }
        return covered | {STATE, POSITIONS}

    def uses_interface(self, kind: type[PreTrainedModel]) -> bool:
        # Models with states do not set transformers' flag, though their attention layers use the interface.
        return file_is_recurrent(kind) and (kind._can_set_attn_implementation() or attends_recurrently(kind))

    def install(self, adapter: ModelAdapter) -> None:
        wrap_functions(adapter.model)
        super().install(adapter)

    def install_on(self, module: nn.Module, adapter: ModelAdapter) -> None:
        adapter.apply(*_give_sharding(adapter), recurrent=module)
        if type(module).__name__ in _LEAVES:
            adapter.gather_once(module)
        for child, (target, wrapper) in own_modules(module).items():
            adapter.apply(_module_patches[target].to(wrapper), **{target: child})

    def refuse_generation(self, model: PreTrainedModel) -> str | None:
        names = sorted(
            {type(module).__name__ for module in model.modules() if passes_no_state_to_a_cache(module)}
        )
        if not names:
            return None
        return (
            f"expected layers whose states transformers' cache holds, got {', '.join(names)}, which no cache"
            " on a ring carries from the prompt to the next token"
        )

    def has_states(self, model: PreTrainedModel) -> bool:
        return any(map(is_recurrent, model.modules()))

    def has_own_cache(self, model: PreTrainedModel) -> bool:
        return any(name in _OWN_STATES for part in model.modules() for _, name in _used(type(part)))

    def mixes_beams(self, model: PreTrainedModel) -> bool:
        # `MiniMaxCache.linear_cache` is no layer of the cache, and `Cache.reorder_cache` knows layers only.
        names = {type(part).__name__ for part in model.modules()}
        return self.has_own_cache(model) or "MiniMaxLightningAttention" in names


def _give_sharding(adapter: ModelAdapter) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the hooks of a recurrent layer that give its functions the sharding of the batch."""
    batches = adapter.session.batches

    @_before_layer
    def before(
        _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        sharding = kwargs.get(SHARDING)
        sharding = batches.current if sharding is None else sharding
        scan.active.append(sharding)
        if not sharding.masks_padding:
            return None
        # Not all functions of single tokens take further arguments.
        arguments = {name: value for name, value in kwargs.items() if name != SHARDING}
        if sharding.real_tokens is not None and "attention_mask" in arguments:
            arguments["attention_mask"] = sharding.real_tokens
        return args, arguments

    @_after_layer
    def after(module: nn.Module, *_: Any) -> None:
        sharding = scan.active.pop()
        if sharding.masks_padding and not sharding.is_replicated:
            methods.keep_last_inputs(module)

    return before, after


def _plain(function: Any) -> Any:
    """Return a function without the wrappers around it."""
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


def _used(kind: type) -> set[tuple[str, str]]:
    """Return the functions and methods of the table that a class uses, by the file that has them."""
    forward = _plain(kind.forward)  # type: ignore[attr-defined]
    names = getattr(getattr(forward, "__code__", None), "co_names", ())
    uses = {(forward.__module__, name) for name in names if name in FUNCTIONS}
    for name in METHODS:
        owner, _, method = name.partition(".")
        for base in kind.__mro__:
            inherited = base.__name__ == owner and method in vars(base)
            if inherited and _plain(getattr(kind, method)) is _plain(vars(base)[method]):
                uses.add((base.__module__, name))
    return uses


def wrap_functions(model: nn.Module) -> None:
    """Wrap the functions and methods that a model's layers use, each once in a process."""
    uses = {use for part in model.modules() for use in _used(type(part))}
    for file, name in uses:
        modeling = sys.modules[file]
        if name not in (known := _wrapped_of_file.setdefault(modeling, set())):
            apply(_patches[name].to(WRAPPERS[name]), modeling=modeling)
            known.add(name)


def file_is_recurrent(kind: type) -> bool:
    """Return whether the modeling file of a class has functions or classes of the table."""
    file = sys.modules.get(kind.__module__)
    return any(hasattr(file, name.partition(".")[0]) for name in WRAPPERS)


def attends_recurrently(kind: type) -> bool:
    """Return whether a model class has no attention: what its file calls so is recurrent (RWKV)."""
    classes = [kind_ for kind_ in vars(sys.modules[kind.__module__]).values() if isinstance(kind_, type)]
    named = [
        kind_
        for kind_ in classes
        if issubclass(kind_, nn.Module)
        and kind_.__module__ == kind.__module__
        and "Attention" in kind_.__name__
    ]
    return bool(named) and all(map(_used, named))


def is_recurrent(part: nn.Module) -> bool:
    """Return whether a part of a model passes a state on, or looks back, by what the table has."""
    return bool(_used(type(part)) or own_modules(part))


def passes_no_state_to_a_cache(part: nn.Module) -> bool:
    """Return whether a part is recurrent, and computes no state after the last token of a prompt."""
    names = {name for _, name in _used(type(part))}
    return bool(names - _GIVES_STATES or (own_modules(part) and type(part).__name__ not in _KEEPS_INPUTS))


def own_modules(part: nn.Module) -> dict[nn.Module, tuple[str, Callable[..., Any]]]:
    """Return the modules inside a part that look back by themselves: a row's target, and the wrapper."""
    modules: dict[nn.Module, tuple[str, Callable[..., Any]]] = {}
    for child in part.children():
        if isinstance(child, nn.ZeroPad2d) and tuple(child.padding) == (0, 0, 1, -1):
            modules[child] = "shift", methods.token_shift
    name = _CONVOLUTIONS.get(type(part).__name__)
    if name is not None:
        modules[getattr(part, name)] = "convolution", methods.convolution_module
    return modules


@lru_cache(maxsize=256)  # inspect parses the whole file each time
def _source(kind: type) -> str | None:
    """Return the source of a class and its bases outside torch; None if it cannot be read."""
    kinds = [base for base in kind.__mro__ if base.__module__.partition(".")[0] != "torch"]
    try:
        return "".join(map(inspect.getsource, kinds[:-1]))  # without object
    except (OSError, TypeError):
        return None


def convolves_locally(part: nn.Module) -> bool:
    """Return whether a part has a convolution over tokens that no wrapper computes."""
    convolutions = {
        name: child
        for name, child in part.named_children()
        if isinstance(child, nn.Conv1d) and child.kernel_size != (1,) and child not in own_modules(part)
    }
    if not convolutions:
        return False
    if any(name.partition(".")[2] == "forward" for _, name in _used(type(part)) if "." in name):
        return False  # the wrapper takes the place of all that the part does
    kind: Any = type(part)  # mypy takes no class of modules for hashable
    source = _source(kind)
    if source is None:
        return True
    # A function of the table gets the weights of a convolution that the part does not call.
    return not _used(type(part)) or any(f"self.{name}(" in source for name in convolutions)
