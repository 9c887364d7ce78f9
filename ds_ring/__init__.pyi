"""The public names of ds_ring, each a row: what type checkers read, and `ds_ring/registry.py`."""

from ds_ring.api import RingAttention as RingAttention
from ds_ring.api import ring_attention as ring_attention
from ds_ring.comm.mesh import RingMesh as RingMesh
from ds_ring.config.section import RingConfig as RingConfig
from ds_ring.contrib.multihead import MultiheadRingAttention as MultiheadRingAttention
from ds_ring.errors import RingBufferError as RingBufferError
from ds_ring.errors import RingCheckpointError as RingCheckpointError
from ds_ring.errors import RingCheckpointMissingError as RingCheckpointMissingError
from ds_ring.errors import RingConfigError as RingConfigError
from ds_ring.errors import RingError as RingError
from ds_ring.errors import RingFiniteError as RingFiniteError
from ds_ring.errors import RingLayoutError as RingLayoutError
from ds_ring.errors import RingMeshError as RingMeshError
from ds_ring.errors import RingMismatchError as RingMismatchError
from ds_ring.errors import RingPatternError as RingPatternError
from ds_ring.errors import RingPeerError as RingPeerError
from ds_ring.errors import RingShapeError as RingShapeError
from ds_ring.errors import RingVerifyError as RingVerifyError
from ds_ring.integrations.deepspeed.enable import enable as enable
from ds_ring.integrations.deepspeed.initialize import initialize as initialize
from ds_ring.layers.cross.attention import CrossAttention as CrossAttention
from ds_ring.layers.cross.attention import cross_attention as cross_attention
from ds_ring.layers.scan.halo import halo as halo
from ds_ring.layers.scan.halo import shift_sequence as shift_sequence
from ds_ring.layers.scan.scan import ring_scan as ring_scan
from ds_ring.layers.selection.attention import selected_attention as selected_attention
from ds_ring.layers.selection.max_logits import max_logits as max_logits
from ds_ring.layers.selection.select import ring_select as ring_select
from ds_ring.layers.sparse.moba import moba_attention as moba_attention
from ds_ring.layers.sparse.nsa import nsa_attention as nsa_attention
from ds_ring.masks.catalog import Causal as Causal
from ds_ring.masks.catalog import Chunked as Chunked
from ds_ring.masks.catalog import Dilated as Dilated
from ds_ring.masks.catalog import DilatedWindow as DilatedWindow
from ds_ring.masks.catalog import Documents as Documents
from ds_ring.masks.catalog import Full as Full
from ds_ring.masks.catalog import PrefixLM as PrefixLM
from ds_ring.masks.catalog import Sinks as Sinks
from ds_ring.masks.catalog import Slices as Slices
from ds_ring.masks.catalog import SlidingWindow as SlidingWindow
from ds_ring.masks.catalog import Tree as Tree
from ds_ring.masks.mask_mod import Alibi as Alibi
from ds_ring.masks.mask_mod import MaskMod as MaskMod
from ds_ring.masks.mask_mod import Softcap as Softcap
from ds_ring.ops.shard import gather_sequence as gather_sequence
from ds_ring.ops.shard import shard_sequence as shard_sequence
from ds_ring.schedule.layout import make_layout as make_layout
from ds_ring.schedule.plan import build_plan as build_plan
from ds_ring.simulation.simulate import SimulationOptions as SimulationOptions
from ds_ring.simulation.simulate import simulate as simulate

__version__: str
__all__: list[str]
