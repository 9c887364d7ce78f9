"""Make `engine.compile` know the backend "ds_ring".

Owns what stands between DeepSpeed's method and the backend, whose work is integrations/compile's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.engine import DeepSpeedEngine

from ds_ring.errors import RingConfigError
from ds_ring.integrations.deepspeed.session import RingSession

_DEFAULT_BACKEND = get_accelerator().get_compile_backend()  # engine.compile's


class RingCompile:
    """Give `engine.compile(backend="ds_ring")` the session; other backends are as they were."""

    def __init__(self, engine: DeepSpeedEngine, session: RingSession, attached: list[Any]) -> None:
        """`attached` are the transformers models on the ring."""
        self._engine, self._session, self._attached = engine, session, attached

    def around_compile(
        self, compile_model: Callable[..., None], backend: Any = _DEFAULT_BACKEND, *args: Any, **kwargs: Any
    ) -> None:
        """Compile by the backend that knows the session, or refuse."""
        if backend == "ds_ring":
            if self._engine.is_deepcompile_enabled():
                raise RingConfigError(
                    'compile.deepcompile: expected false beside backend="ds_ring", got true: DeepCompile has'
                    " a backend of its own; set it to false"
                )
            if self._engine.is_compiled:
                raise RingConfigError(
                    'engine.compile(backend="ds_ring"): expected an engine that is not compiled, got one that'
                    " is: DeepSpeed would keep its first backend; say it once, before the first batch"
                )
            if self._session.config.dynamic_ring:
                raise RingConfigError(
                    'dynamic_ring: expected false with engine.compile(backend="ds_ring"), got true: a graph'
                    " is compiled for one ring; leave one of them out"
                )
            from ds_ring.integrations.compile.backend import backend_of

            backend = backend_of(self._session)
            for one in self._attached:
                one.rewritten = True
        compile_model(backend, *args, **kwargs)
