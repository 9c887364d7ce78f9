"""Which parts of a model are recurrent, and the wrappers that compute them on a ring.

Owns the wrappers of `model.py`'s table, by the names of functions and methods of modeling files. A part is
recurrent if its forward calls a function of the table, or if its class has a method of it.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

from torch import nn

from ds_ring.integrations.deepspeed.batch import SHARDING
from ds_ring.integrations.transformers import recurrent, recurrent_layers
from ds_ring.integrations.transformers.model import RECURRENT_FUNCTIONS, RECURRENT_METHODS, TABLE

_WRAPPERS = (
    recurrent.convolution, recurrent.delta_rule, recurrent.delta_rule, recurrent.mamba2, recurrent.mamba1,
    recurrent.not_fused, recurrent.not_fused, recurrent_layers.wkv,
    recurrent_layers.lightning_attention, recurrent_layers.rg_lru, recurrent_layers.compressed_convolution,
    recurrent_layers.mlstm, recurrent_layers.ngrams,
)  # fmt: skip
FUNCTIONS: dict[str, Callable[..., Any]] = dict(
    zip((*RECURRENT_FUNCTIONS, *RECURRENT_METHODS), _WRAPPERS, strict=True)
)
# Whose wrappers compute the state after a prompt, or whose layer keeps what they read in a cache.
_GIVES_STATES = {
    "causal_conv1d_fn", "torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention", "mamba2_chunk_scan",
    "mamba_selective_scan", "mamba2_split_conv1d_scan_combined", "mamba_inner_fn",
}  # fmt: skip
# nn.Conv1d modules that are called by themselves, by the class that has them.
_CONVOLUTIONS = {"RecurrentGemmaRecurrentBlock": "conv_1d", "Qwen4ExpTextPLELayer": "conv1d"}
_wrapped: set[tuple[str, str]] = set()  # file and name; they stay, and call the original without a ring


def _plain(function: Any) -> Any:
    """Return a function without the wrappers around it."""
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


def _used(kind: type) -> set[tuple[str, str]]:
    """Return the functions and methods of the table that a class uses, by the file that has them."""
    forward = _plain(kind.forward)  # type: ignore[attr-defined]
    names = getattr(getattr(forward, "__code__", None), "co_names", ())
    found = {(forward.__module__, name) for name in names if name in RECURRENT_FUNCTIONS}
    for name in RECURRENT_METHODS:
        owner, _, method = name.partition(".")
        for base in kind.__mro__:
            inherited = base.__name__ == owner and method in vars(base)
            if inherited and _plain(getattr(kind, method)) is _plain(vars(base)[method]):
                found.add((base.__module__, name))
    return found


def wrap_functions(model: nn.Module) -> None:
    """Wrap the functions and methods that a model's parts use, each once in a process."""
    for file, name in {use for part in model.modules() for use in _used(type(part))} - _wrapped:
        feature = SimpleNamespace(around_call=FUNCTIONS[name])
        TABLE.apply({f"recurrence.{name}": feature}, modeling=sys.modules[file])
        _wrapped.add((file, name))


def file_is_recurrent(kind: type) -> bool:
    """Return whether the modeling file of a class has functions or classes of the table."""
    file = sys.modules.get(kind.__module__)
    return any(hasattr(file, name.partition(".")[0]) for name in FUNCTIONS)


def attends_recurrently(kind: type) -> bool:
    """Return whether a model class has no attention: what its file calls so is recurrent (RWKV)."""
    classes = [one for one in vars(sys.modules[kind.__module__]).values() if isinstance(one, type)]
    named = [
        one
        for one in classes
        if issubclass(one, nn.Module) and one.__module__ == kind.__module__ and "Attention" in one.__name__
    ]
    return bool(named) and all(map(_used, named))


def is_recurrent(part: nn.Module) -> bool:
    """Return whether a part of a model passes a state on, or looks back, by what the table has."""
    return bool(_used(type(part)) or own_modules(part))


def passes_no_state_to_a_cache(part: nn.Module) -> bool:
    """Return whether a part is recurrent, and computes no state after the last token of a prompt."""
    names = {name for _, name in _used(type(part))}
    return bool(names - _GIVES_STATES or own_modules(part))


def own_modules(part: nn.Module) -> dict[nn.Module, tuple[str, Callable[..., Any]]]:
    """Return the modules inside a part that look back by themselves: a row's target, and the wrapper."""
    found: dict[nn.Module, tuple[str, Callable[..., Any]]] = {}
    for child in part.children():
        if isinstance(child, nn.ZeroPad2d) and tuple(child.padding) == (0, 0, 1, -1):
            found[child] = "shift", recurrent_layers.token_shift
    name = _CONVOLUTIONS.get(type(part).__name__)
    if name is not None:
        found[getattr(part, name)] = "convolution", recurrent_layers.convolution_module
    return found


@lru_cache(maxsize=256)  # inspect parses the whole file each time
def _source(kind: type) -> str | None:
    """Return the source of a class and its bases outside torch; None if it cannot be read."""
    kinds = [one for one in kind.__mro__ if one.__module__.partition(".")[0] != "torch"]
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


def told_sharding(session: Any) -> SimpleNamespace:
    """Return the hooks of a recurrent part that tell its functions the sharding of the batch."""

    def before(
        _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        told = kwargs.get(SHARDING)
        told = session.batches.current if told is None else told
        recurrent.active.append(told)
        if not told.masks_padding:
            return None
        # Not all functions of single tokens take further arguments.
        given = {name: value for name, value in kwargs.items() if name != SHARDING}
        if told.real_tokens is not None and "attention_mask" in given:
            given["attention_mask"] = told.real_tokens
        return args, given

    def after(*_: Any) -> None:
        recurrent.active.pop()

    return SimpleNamespace(before_forward=before, after_forward=after)
