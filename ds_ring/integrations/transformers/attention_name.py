"""Make transformers know `attn_implementation="ds_ring"`, and import neither it nor torch for that.

The name is registered when transformers has been imported, before or after ds_ring. attention.py, which
imports DeepSpeed, is imported by the first call of the attention.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

NAME = "ds_ring"
_OWNER = "transformers.modeling_utils"  # has PreTrainedModel and the table of attention functions


def register_with_transformers() -> None:
    """Register the name now if transformers has been imported, otherwise right after it is imported."""
    if hasattr(sys.modules.get(_OWNER), "PreTrainedModel"):
        _register()
    else:
        sys.meta_path.insert(0, _AfterImport())


class _AfterImport(MetaPathFinder):
    """Find transformers.modeling_utils as other finders do, and register the name once it is imported."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname != _OWNER:
            return None
        from ds_ring.integrations.transformers.model import TABLE

        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:

            def then_register(execute: Callable[[Any], None], module: Any) -> None:
                execute(module)
                _register()

            TABLE.apply({"name.import": SimpleNamespace(at_import=then_register)}, loader=spec.loader)
        return spec


def _register() -> None:
    from ds_ring.integrations.transformers.model import TABLE

    name_them(_attention, _mask)
    TABLE.apply({"name": SimpleNamespace(around_init=_choose_or_refuse)})


def name_them(attention: Callable[..., Any], mask: Callable[..., Any]) -> None:
    """Register an attention function and its mask function under the name."""
    from transformers import AttentionInterface, AttentionMaskInterface

    from ds_ring.integrations.transformers.model import TABLE

    functions = {
        "attention function": SimpleNamespace(at_import=lambda: AttentionInterface.register(NAME, attention)),
        "mask function": SimpleNamespace(at_import=lambda: AttentionMaskInterface.register(NAME, mask)),
    }
    TABLE.apply(functions)


def _choose_or_refuse(
    choose: Callable[..., str], model: Any, requested_attention: str | None, *args: Any, **kwargs: Any
) -> str:
    # A class that does not support the name: Falcon raises a KeyError, others ignore it.
    if requested_attention == NAME:
        from ds_ring.integrations.transformers.checks import bypass_error, uses_interface

        if not uses_interface(type(model)):
            raise bypass_error(type(model))
    return choose(model, requested_attention, *args, **kwargs)


def _attention(*args: Any, **kwargs: Any) -> Any:
    from ds_ring.integrations.transformers.attention import attention

    return attention(*args, **kwargs)


def _mask(*args: Any, **kwargs: Any) -> Any:
    from ds_ring.integrations.transformers.attention import mask

    return mask(*args, **kwargs)
