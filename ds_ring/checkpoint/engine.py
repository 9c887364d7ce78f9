"""The checkpoints of an engine of `ds_ring.initialize`: sealed where DeepSpeed has any, else refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

from ds_ring.checkpoint.load import guard_checkpoints
from ds_ring.checkpoint.manifest import attempt_in
from ds_ring.data.engine import ENGINE
from ds_ring.data.engine_part import EnginePart, EngineStart
from ds_ring.data.run_folder import attempt_folder
from ds_ring.engines.deepspeed.refusals import ADD_OPTIMIZER
from ds_ring.errors import RingCheckpointError
from ds_ring.patches import patch


class SealedCheckpoints(EnginePart):
    """Save and load no checkpoint that is not whole."""

    def patches(self, start: EngineStart) -> list[Any]:
        """Return the patches of `save_checkpoint` and `load_checkpoint`."""
        if start.engine.checkpoint_engine is not None:
            limit = start.session.run_mesh.timeouts.limit("checkpoint")
            return [*guard_checkpoints(start.engine, attempt_in(attempt_folder()), limit)]
        return [] if start.trains else [refuse_checkpoints]


_files_patch = partial(
    patch, ENGINE, feature="no_checkpoints", when="ZeRO 3 without an optimizer",
    reason="DeepSpeed has no checkpoints there: raises a typed error",
)  # fmt: skip


@_files_patch("save_checkpoint", stage="around_save")
@_files_patch("load_checkpoint", stage="around_load")
def refuse_checkpoints(call: Callable[..., Any], *_: Any, **__: Any) -> NoReturn:
    """Refuse checkpoints of an engine that has no optimizer at ZeRO 3."""
    raise RingCheckpointError(
        f"engine.{call.__name__}: DeepSpeed has no checkpoints at ZeRO 3 without an optimizer;"
        f" {ADD_OPTIMIZER}, or load the weights into the model before ds_ring.initialize"
    )
