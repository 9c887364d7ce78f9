"""What ds_ring changes in DeepSpeed, in an engine, and in Python and torch for an engine: owners of patches.

Patches are applied where their feature begins: in `enable`, `initialize`, a save, a load, a loader. Also what
these files ask of an engine's model.
"""

from __future__ import annotations

from torch import nn

from ds_ring.integrations.adapter import PatchTable

DEEPSPEED = PatchTable("deepspeed", ">=0.19.8,<0.20")
ENGINE = DEEPSPEED.given("engine", "deepspeed.runtime.engine.DeepSpeedEngine")
MODULE = DEEPSPEED.given("module", "torch.nn.Module")  # of an engine


def is_of_transformers(model: nn.Module) -> bool:
    """Return whether a module has the interface of transformers' models."""
    return hasattr(model, "set_attn_implementation") and hasattr(model, "config")


def modules_of_encoders(model: nn.Module) -> set[int]:
    """Return the identities of the modules inside `model` whose outputs are no shards of the sequence."""
    of_transformers = [part for part in model.modules() if is_of_transformers(part)]
    if not of_transformers:
        return set()
    from ds_ring.integrations.transformers.variants import apart

    return {id(module) for part in of_transformers for module in apart(part)}
