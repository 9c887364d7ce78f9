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

# By modules of others: a name in each, and the module of ds_ring that has to know when it is imported.
_AFTER_IMPORT = {
    "transformers.modeling_utils": ("PreTrainedModel", "ds_ring.models.registration"),
    "deepspeed.runtime.engine": ("DeepSpeedEngine", "ds_ring.engines.unread_section"),
}


class _BeforeImport(MetaPathFinder):
    """Let a module of ds_ring know of another package's import: its `register` is called right after it."""

    def __init__(self, module: str, home: str) -> None:
        self.module, self.home = module, home

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname != self.module:
            return None
        sys.meta_path.remove(self)
        from ds_ring.patches import find_patched

        return find_patched(fullname, load(f"{self.home}.execute_and_register"))


for _module, (_name, _home) in _AFTER_IMPORT.items():
    if get_imported(_module, _name) is not None:
        load(f"{_home}.register")()
    else:
        sys.meta_path.insert(0, _BeforeImport(_module, _home))


def __getattr__(name: str) -> Any:
    """Import the module of a public name, and keep the name here."""
    if name not in PUBLIC:
        raise AttributeError(f"module 'ds_ring' has no attribute {name!r}")
    value = globals()[name] = load(PUBLIC[name])
    return value


def __dir__() -> list[str]:
    """List all public names, those not imported yet included."""
    return sorted({*globals(), *__all__})
