"""One row of `plugin.ENGINE_PARTS`: what a capability adds to an engine of `ds_ring.initialize`.

`initialize` asks all rows, in their order, and names none. A row that is applied later is outside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ds_ring.config.section import RingConfig
from ds_ring.data.session import RingSession
from ds_ring.plugin import ENGINE_PARTS, load


class AttachedModels(NamedTuple):
    """What is put on an engine for the models inside its module.

    Attributes:
        adapters: the `ModelAdapter` of each transformers model.
        wrapper: calls a module that has such models inside; None if there is none.
        watch: makes what watches the users' modules, of session, engine and adapters; None if nothing does.
        first_batch: the check of the first step, if the section asks for it.
    """

    adapters: list[Any] = []  # noqa: RUF012
    wrapper: Any = None
    watch: Callable[..., Any] | None = None
    first_batch: Any = None


class EngineStart(NamedTuple):
    """An engine that has been made.

    Attributes:
        adapters: the `ModelAdapter` of each transformers model in it.
        trains: whether it has an optimizer.
    """

    engine: Any
    session: RingSession
    adapters: list[Any]
    trains: bool


class EnginePart:
    """One capability; the methods of this class change nothing."""

    def check(self, config: RingConfig, deepspeed_config: dict[str, Any]) -> None:
        """Refuse a configuration, before this rank has met the others.

        Raises:
            RingConfigError: with the reason.
        """

    def patches(self, start: EngineStart) -> list[Any]:
        """Return the patches of an engine, from the inside out."""
        return []


def engine_parts() -> list[EnginePart]:
    """Return an instance of each row."""
    return [load(home)() for home in ENGINE_PARTS.values()]
