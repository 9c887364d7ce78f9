"""The rows of this folder: what others find by its names."""

from __future__ import annotations

from ds_ring.contrib.drafter.attention import draft_attention, draft_loss
from ds_ring.contrib.drafter.batch import drafter_batch
from ds_ring.plugin import Plugin

PLUGIN = Plugin(
    order=50,
    requires=("patterns/private",),
    session_methods={
        "drafter_batch": drafter_batch,
        "draft_attention": draft_attention,
        "draft_loss": draft_loss,
    },
)
