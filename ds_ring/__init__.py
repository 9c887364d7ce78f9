"""ds_ring: ring attention for DeepSpeed. The public names, nothing else."""

from typing import TYPE_CHECKING, Any

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
from ds_ring.schedule.layout import make_layout
from ds_ring.schedule.plan import build_plan
from ds_ring.simulate import simulate

if TYPE_CHECKING:
    from ds_ring.integrations.deepspeed.initialize import initialize

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


def __getattr__(name: str) -> Any:
    """`initialize` imports DeepSpeed (seconds), so only when it is asked for."""
    if name == "initialize":
        from ds_ring.integrations.deepspeed.initialize import initialize

        return initialize
    raise AttributeError(f"module 'ds_ring' has no attribute {name!r}")
