"""The table of attention variants: each row is a class, and each variant is a file or a folder.

Delete a variant's file and its row, and models that need it are refused; all others run as before. Rows are
tried in this order: a variant that chooses which sequence a layer reads comes before those that attend.
"""

from __future__ import annotations

import functools
import pkgutil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ds_ring.integrations.transformers.variants.variant import Variant

_HERE = "ds_ring.integrations.transformers.variants"
TABLE = (
    "encoder_decoder.EncoderDecoder",
    "eager_attention.layers.EagerAttention",
    "recurrent.layers.Recurrent",
    "compressed.CompressedAttention",
    "indexed.IndexedKeys",
    "indexed_blocks.IndexedBlocks",
    "latents.LatentLayers",
    "relative_bias.RelativePositionBias",
    "key_terms.DynamicMask",
    "query_scale.TemperatureTuning",
)


@functools.cache
def variants() -> tuple[Variant, ...]:
    """Return one instance of each row. Imports their files, which import transformers."""
    return tuple(pkgutil.resolve_name(f"{_HERE}.{row}")() for row in TABLE)
