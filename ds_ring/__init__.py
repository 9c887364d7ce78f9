"""ds_ring: ring attention for DeepSpeed. The public names, which are the rows of `__init__.pyi`, and
`attn_implementation="ds_ring"` of transformers.

A name is imported at its first use: `import ds_ring` takes no torch with it (more than a second), a
section can be read without it, and only `initialize` imports DeepSpeed.
"""

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

from ds_ring.compat import get_imported
from ds_ring.plugin import PUBLIC, load

__version__ = "0.1.0"

# No module of this folder may have the name of a public function: importing it would take that name.
__all__ = sorted(PUBLIC)

_TRANSFORMERS = "transformers.modeling_utils"  # has PreTrainedModel and the table of attention functions


class _BeforeTransformers(MetaPathFinder):
    """Let models/registration.py find transformers.modeling_utils: it registers the name right after."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname != _TRANSFORMERS:
            return None
        sys.meta_path.remove(self)
        from ds_ring.models.registration import find_and_register

        return find_and_register(fullname)


if get_imported(_TRANSFORMERS, "PreTrainedModel") is not None:
    load("ds_ring.models.registration.register")()
else:
    sys.meta_path.insert(0, _BeforeTransformers())


def __getattr__(name: str) -> Any:
    """Import the module of a public name, and keep the name here."""
    if name not in PUBLIC:
        raise AttributeError(f"module 'ds_ring' has no attribute {name!r}")
    value = globals()[name] = load(PUBLIC[name])
    return value


def __dir__() -> list[str]:
    """List all public names, those not imported yet included."""
    return sorted({*globals(), *__all__})
