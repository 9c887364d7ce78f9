"""What ds_ring changes in DeepSpeed, in an engine, and in Python and torch for an engine: owners of patches.

Patches are applied where their feature begins: in `enable`, `initialize`, a save, a load, a loader. Also what
these files ask of an engine's model.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from ds_ring.patches import PatchTable

DEEPSPEED = PatchTable("deepspeed", ">=0.16.9")
ENGINE = DEEPSPEED.given("engine", "deepspeed.runtime.engine.DeepSpeedEngine")
MODULE = DEEPSPEED.given("module", "torch.nn.Module")  # of an engine


def is_transformers_model(model: nn.Module) -> bool:
    """Return whether a module has the interface of transformers' models."""
    return hasattr(model, "set_attn_implementation") and hasattr(model, "config")


def draws_random_numbers(model: nn.Module) -> bool:
    """Return whether a model in training has an active dropout, or another rate of that name."""
    return any(_has_rate(module, ("drop", "jitter")) for module in model.modules())


def drops_layers(model: nn.Module) -> bool:
    """Return whether a model in training leaves layers out at random."""
    return any(_has_rate(module, ("layerdrop", "layer_drop")) for module in model.modules())


def _has_rate(module: nn.Module, words: tuple[str, ...]) -> bool:
    values: dict[str, Any] = vars(module)
    if isinstance(module, nn.modules.dropout._DropoutNd):
        values = {"dropout": module.p}
    return any(
        isinstance(value, float) and value > 0 and any(word in name for word in words)
        for name, value in values.items()
    )
