"""Let the adapters of peft call the model that they adapt, so that its hooks run."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from torch import nn

from ds_ring.compat import get_imported
from ds_ring.patches import PatchTable, apply, patch

PEFT = PatchTable("peft", ">=0.11")
_FILE = "peft.tuners.tuners_utils"


@patch(
    PEFT.imported(f"{_FILE}.BaseTuner"), "forward", stage="at_initialize", kind="replaced",
    feature="adapters",
    reason="calls the model, not its forward, as peft does from 0.21 on: hooks of the model run",
)  # fmt: skip
def _call_model(tuner: Any, *args: Any, **kwargs: Any) -> Any:
    return tuner.model(*args, **kwargs)


@lru_cache(maxsize=1)  # once a process
def let_tuners_call() -> None:
    """Let every adapter call its model."""
    apply(_call_model)


def attach_tuners(model: nn.Module) -> None:
    """Let the adapters inside a model call it, if it has some."""
    kind = get_imported(_FILE, "BaseTuner")
    if kind is not None and any(isinstance(part, kind) for part in model.modules()):
        let_tuners_call()
