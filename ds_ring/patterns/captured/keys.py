"""The key "mask_mod" of the JSON's "pattern" section."""

from __future__ import annotations

import re
from importlib import import_module
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from ds_ring.config.messages import Accepted, FurtherKeys, Refused, sentence
from ds_ring.errors import RingPatternError, shown
from ds_ring.masks.catalog import Causal
from ds_ring.masks.pattern import Pattern

_FORM = '"module:function"'


def _checked(value: Any) -> Any:
    if value is None or (isinstance(value, str) and re.fullmatch(r"[\w.]+:\w+", value)):
        return value
    raise Refused(sentence(_FORM, shown(value), 'write "my_masks:strided", say'))


MaskModName = Annotated[str | None, BeforeValidator(_checked), Accepted(_FORM, "use null for no function")]


class MaskModKeys(FurtherKeys):
    """Add a mask function of the user's."""

    mask_mod: MaskModName = Field(default=None, description="a FlexAttention `mask_mod` to import")

    def composed(self, parts: list[Pattern], causal: bool) -> list[Pattern]:
        if self.mask_mod is None:
            return parts
        from ds_ring.patterns.captured.mask_mod import MaskMod

        # Causal lets the plan leave out later tokens, which it cannot see in a function.
        return [*parts, MaskMod(_imported(self.mask_mod)), *([Causal()] if causal and not parts else [])]


def _imported(name: str) -> Any:
    """Return a function, "module:function", from where Python finds it: beside the script, say."""
    module, _, function = name.partition(":")
    try:
        return getattr(import_module(module), function)
    except (ImportError, AttributeError) as error:
        expected, advice = (
            "a function that can be imported",
            "put its file beside the script, or on PYTHONPATH",
        )
        raise RingPatternError.wrong("pattern.mask_mod", expected, f"{name!r} ({error})", advice) from error
