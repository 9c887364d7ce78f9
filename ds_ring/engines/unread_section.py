"""Refuse an engine whose DeepSpeed JSON has a "ring_attention" section that no ring has read.

DeepSpeed ignores sections that it does not know: ranks would train by themselves, without a word. The refusal
is there from `import ds_ring` on: at once, or when `deepspeed.runtime.engine` is imported afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ds_ring.config.json_text import SECTION
from ds_ring.data.engine import DEEPSPEED
from ds_ring.errors import RingConfigError
from ds_ring.patches import apply, patch


@patch(
    DEEPSPEED.given("loader"), "exec_module", stage="at_import", feature="unread section.import",
    reason="applies the refusal without importing DeepSpeed",
    when="DeepSpeed was not imported before ds_ring",
)  # fmt: skip
def execute_and_register(execute: Callable[[Any], None], module: Any) -> None:
    """Execute deepspeed.runtime.engine, then apply the refusal."""
    execute(module)
    register()


def register() -> None:
    """Apply the refusal to DeepSpeed's engine."""
    apply(_refuse_unread_section)


@patch(
    DEEPSPEED.imported("deepspeed.runtime.engine.DeepSpeedEngine"), "__init__", stage="around_init",
    feature="unread section", reason="DeepSpeed ignores the section, and ranks train by themselves: raises",
)  # fmt: skip
def _refuse_unread_section(start: Callable[..., None], engine: Any, *args: Any, **kwargs: Any) -> None:
    """Refuse a section that no ring has read: `enable()` was not called, or too late."""
    if SECTION in (getattr(kwargs.get("config_class"), "_param_dict", None) or {}):
        raise RingConfigError(
            f'deepspeed.initialize: expected ds_ring to have read "{SECTION}", got a function that has not;'
            " call ds_ring.initialize in its place, or ds_ring.enable() before you import the name"
        )
    start(engine, *args, **kwargs)
