"""Make transformers know `attn_implementation="ds_ring"`, and import neither it nor torch for that.

Owns the registration of the name, and its time: when transformers has been imported, before or after ds_ring.
What stands behind the name is attention.py, which imports DeepSpeed; its first call imports it.
"""

from __future__ import annotations

import functools
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
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
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def then_register(module: Any) -> None:
                execute(module)
                _register()

            spec.loader.exec_module = then_register  # type: ignore[method-assign]
        return spec


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

    choose = PreTrainedModel.get_correct_attn_implementation

    @functools.wraps(choose)
    def choose_or_refuse(
        self: PreTrainedModel, requested_attention: str | None, *args: Any, **kwargs: Any
    ) -> str:
        # A class that does not know the name: Falcon raises a KeyError, others go without.
        if requested_attention == NAME and not self._supports_attention_backend:
            from ds_ring.integrations.transformers.checks import bypasses

            raise bypasses(type(self))
        chosen: str = choose(self, requested_attention, *args, **kwargs)
        return chosen

    PreTrainedModel.get_correct_attn_implementation = choose_or_refuse  # type: ignore[method-assign]
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)


def _attention(*args: Any, **kwargs: Any) -> Any:
    from ds_ring.integrations.transformers.attention import attention

    return attention(*args, **kwargs)


def _mask(*args: Any, **kwargs: Any) -> Any:
    from ds_ring.integrations.transformers.attention import mask

    return mask(*args, **kwargs)
