"""The rows of this folder: what others find by its names."""

from __future__ import annotations

from ds_ring.memory.host.head_stream import OnHost
from ds_ring.memory.host.keys import HostKeys, OffloadedAttention
from ds_ring.memory.host.offloaded_checkpoints import OffloadedCheckpoints
from ds_ring.plugin import Plugin

PLUGIN = Plugin(
    order=40,
    needs={"transformers": ""},
    saved_tensors={"offload_attention": OnHost},
    model_parts={"offload_checkpoints": OffloadedCheckpoints},
    part_keys={"long_sequence.host": HostKeys},
    json_keys={"OffloadedAttention": OffloadedAttention},
)
