"""Support an engine without an optimizer: forward passes at every ZeRO stage, clear errors for the rest.

Owns what DeepSpeed 0.19.8 cannot do there by itself: ZeRO 1 and 2 refuse to start (they shard an optimizer's
state, and there is none), ZeRO 3 has no checkpoints, and a backward pass fails an assertion.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, NoReturn

from ds_ring.errors import RingCheckpointError, RingConfigError, RingError

log = logging.getLogger(__name__)

_ADD_ONE = 'pass optimizer=..., or add {"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}} to the JSON'


def has_optimizer(config: dict[str, Any], optimizer: object) -> bool:
    """Return whether DeepSpeed will have an optimizer: one that is passed, or the JSON's."""
    return optimizer is not None or bool((config.get("optimizer") or {}).get("type"))


def without_optimizer(config: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON for an engine that only evaluates: ZeRO 1 and 2 have nothing to shard."""
    zero = config.get("zero_optimization") or {}
    if zero.get("stage") not in (1, 2):
        return config
    log.info("no optimizer: ZeRO %s would shard its state only, and is 0 here", zero["stage"])
    return config | {"zero_optimization": {"stage": 0}}


def only_evaluates(engine: Any) -> None:
    """Make what needs an optimizer raise a typed error on this engine, on every rank alike."""
    for name in ("backward", "step", "scale"):
        _refuse(engine, name, RingConfigError, f"engine.{name}: expected an optimizer, got none; {_ADD_ONE}")
    if engine.checkpoint_engine is None:  # ZeRO 3
        for name in ("save_checkpoint", "load_checkpoint"):
            why = (
                f"engine.{name}: DeepSpeed has no checkpoints at ZeRO 3 without an optimizer; {_ADD_ONE}"
                " (load_module_only=True leaves its states), or load the weights into the model before"
                " ds_ring.initialize"
            )
            _refuse(engine, name, RingCheckpointError, why)


def _refuse(engine: Any, name: str, error: Callable[[str], RingError], why: str) -> None:
    method = getattr(engine, name, None)
    if method is None:
        return

    @functools.wraps(method)
    def refused(*args: Any, **kwargs: Any) -> NoReturn:
        raise error(why)

    setattr(engine, name, refused)
