"""ds_ring: ring attention for DeepSpeed. The public names, nothing else.

A name is imported when it is asked for: `import ds_ring` takes no torch with it (more than a second), a
section can be read without it, and only `initialize` imports DeepSpeed.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the same as the table below, for whoever reads without running
    from ds_ring.config.section import RingConfig
    from ds_ring.errors import (
        RingBufferError,
        RingCheckpointError,
        RingCheckpointMissingError,
        RingConfigError,
        RingError,
        RingFiniteError,
        RingLayoutError,
        RingMeshError,
        RingMismatchError,
        RingPatternError,
        RingPeerError,
        RingShapeError,
        RingVerifyError,
    )
    from ds_ring.integrations.deepspeed.initialize import initialize
    from ds_ring.masks.chunked import Chunked
    from ds_ring.masks.dense import Causal, Full
    from ds_ring.masks.dilated import Dilated
    from ds_ring.masks.documents import Documents
    from ds_ring.masks.mask_mod import MaskMod
    from ds_ring.masks.prefix import PrefixLM
    from ds_ring.masks.sinks import Sinks
    from ds_ring.masks.slices import Slices
    from ds_ring.masks.windows import DilatedWindow, SlidingWindow
    from ds_ring.module import RingAttention, ring_attention
    from ds_ring.runtime.mesh import RingMesh
    from ds_ring.runtime.shard import gather_sequence, shard_sequence
    from ds_ring.schedule.layouts import make_layout
    from ds_ring.schedule.plan import build_plan
    from ds_ring.simulation.simulate import simulate

__version__ = "0.1.0"

__all__ = [
    "Causal",
    "Chunked",
    "Dilated",
    "DilatedWindow",
    "Documents",
    "Full",
    "MaskMod",
    "PrefixLM",
    "RingAttention",
    "RingBufferError",
    "RingCheckpointError",
    "RingCheckpointMissingError",
    "RingConfig",
    "RingConfigError",
    "RingError",
    "RingFiniteError",
    "RingLayoutError",
    "RingMesh",
    "RingMeshError",
    "RingMismatchError",
    "RingPatternError",
    "RingPeerError",
    "RingShapeError",
    "RingVerifyError",
    "Sinks",
    "Slices",
    "SlidingWindow",
    "build_plan",
    "gather_sequence",
    "initialize",
    "make_layout",
    "ring_attention",
    "shard_sequence",
    "simulate",
]

# No module of this folder may have the name of a public function: importing it would take that name.
_MODULES = {
    "config.section": ("RingConfig",),
    "errors": tuple(name for name in __all__ if name.endswith("Error")),
    "integrations.deepspeed.initialize": ("initialize",),
    "module": ("RingAttention", "ring_attention"),
    "masks.mask_mod": ("MaskMod",),
    "runtime.mesh": ("RingMesh",),
    "runtime.shard": ("gather_sequence", "shard_sequence"),
    "masks.dilated": ("Dilated",),
    "masks.documents": ("Documents",),
    "schedule.layouts": ("make_layout",),
    "masks.chunked": ("Chunked",),
    "masks.dense": ("Causal", "Full"),
    "masks.prefix": ("PrefixLM",),
    "masks.sinks": ("Sinks",),
    "masks.slices": ("Slices",),
    "masks.windows": ("DilatedWindow", "SlidingWindow"),
    "schedule.plan": ("build_plan",),
    "simulation.simulate": ("simulate",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import the module of a public name, and keep the name here."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'ds_ring' has no attribute {name!r}")
    value = getattr(import_module(f"ds_ring.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names that have not been asked for yet, too."""
    return sorted({*globals(), *__all__})
