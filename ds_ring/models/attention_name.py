"""Make transformers know `attn_implementation="ds_ring"`, and import neither it nor torch for that.

The name is registered when transformers has been imported, before or after ds_ring. attention.py, which
imports DeepSpeed, is imported by the first call of the attention.
"""

from __future__ import annotations

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
        from ds_ring.models.registration import register

        register()
    else:
        sys.meta_path.insert(0, _AfterImport())


class _AfterImport(MetaPathFinder):
    """Find transformers.modeling_utils as other finders do, and register the name once it is imported."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname != _OWNER:
            return None
        from ds_ring.models.registration import then_register
        from ds_ring.patches import apply

        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            apply(then_register, loader=spec.loader)
        return spec
