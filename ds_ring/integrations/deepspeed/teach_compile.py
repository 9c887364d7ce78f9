"""Make `engine.compile` know the backend "ds_ring".

Owns what stands between DeepSpeed's method and the backend, whose work is integrations/compile's.
"""

from __future__ import annotations

import functools
from typing import Any

from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.engine import DeepSpeedEngine

from ds_ring.errors import RingConfigError
from ds_ring.integrations.deepspeed.session import RingSession

_DEFAULT_BACKEND = get_accelerator().get_compile_backend()  # engine.compile's


def teach_compile(engine: DeepSpeedEngine, session: RingSession, attached: list[Any]) -> None:
    """Make `engine.compile(backend="ds_ring")` know the session; other backends are as they were."""
    compile_as_before = engine.compile

    @functools.wraps(compile_as_before)
    def compile_with_session(backend: Any = _DEFAULT_BACKEND, *args: Any, **kwargs: Any) -> None:
        if backend == "ds_ring":
            if engine.is_deepcompile_enabled():
                raise RingConfigError(
                    'compile.deepcompile: expected false beside backend="ds_ring", got true: DeepCompile has'
                    " a backend of its own; set it to false"
                )
            if engine.is_compiled:
                raise RingConfigError(
                    'engine.compile(backend="ds_ring"): expected an engine that is not compiled, got one that'
                    " is: DeepSpeed would keep its first backend; say it once, before the first batch"
                )
            if session.config.dynamic_ring:
                raise RingConfigError(
                    'dynamic_ring: expected false with engine.compile(backend="ds_ring"), got true: a graph'
                    " is compiled for one ring; leave one of them out"
                )
            from ds_ring.integrations.compile.backend import backend_of

            backend = backend_of(session)
            for one in attached:
                one.rewritten = True
        compile_as_before(backend, *args, **kwargs)

    engine.compile = compile_with_session
