"""`engine.compile(backend="ds_ring")`: the backend gets the session of the engine."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.engine import DeepSpeedEngine

from ds_ring.contrib.compile.backend import backend_of
from ds_ring.data.engine import ENGINE, MODULE
from ds_ring.data.engine_part import EnginePart, EngineStart
from ds_ring.data.session import RingSession
from ds_ring.errors import RingConfigError
from ds_ring.patches import apply, patch

_DEFAULT_BACKEND = get_accelerator().get_compile_backend()  # engine.compile's

_compiled_call = patch(
    MODULE, "_compiled_call_impl", stage="around_compile", kind="set", feature="compile.graph",
    reason="a graph of the ring ends with the engine", when='engine.compile(backend="ds_ring") was called',
)  # fmt: skip


class CompiledEngine(EnginePart):
    """Let `engine.compile` know the backend "ds_ring"."""

    def patches(self, start: EngineStart) -> list[Any]:
        """Return the patch of `engine.compile`."""
        return [partial(compile_with_ring, start.engine, start.session, start.adapters)]


@patch(
    ENGINE, "compile", stage="around_compile", feature="compile",
    reason='backend="ds_ring" gets the session; DeepCompile and a second backend are refused',
)  # fmt: skip
def compile_with_ring(
    engine: DeepSpeedEngine,
    session: RingSession,
    attached: list[Any],
    compile_model: Callable[..., None],
    backend: Any = _DEFAULT_BACKEND,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Call `engine.compile`, whose backend "ds_ring" gets the session; other backends are as they were."""
    if session.needs.batches is not None:
        name = session.needs.batches.name
        raise RingConfigError(f"engine.compile: expected a model of one sequence, got {name}; leave it out")
    if backend == "ds_ring":
        if engine.is_deepcompile_enabled():
            raise RingConfigError.wrong(
                "compile.deepcompile", "false", "true", 'set it to false for the backend "ds_ring"'
            )
        if engine.is_compiled:
            raise RingConfigError.wrong(
                "engine.compile", "an engine that is not compiled", "one that is", "call it once"
            )
        if session.config.get("dynamic_ring"):
            raise RingConfigError.wrong(
                "dynamic_ring", "false in a compiled graph", "true", "set it to false"
            )
        backend = backend_of(session)
        for adapter in attached:
            adapter.rewritten = True
        apply(_compiled_call.to(None), session=session, module=engine.module)
    compile_model(backend, *args, **kwargs)
