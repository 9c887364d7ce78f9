"""The rows of this folder: what others find by its names."""

from __future__ import annotations

from ds_ring.plugin import PassRow, Plugin
from ds_ring.transports.all_gather.gather_pass import make_pass

PLUGIN = Plugin(
    order=40,
    passes={
        "all_gather": PassRow(home=make_pass, no_hops="has no hops", no_offload="takes all of them at once")
    },
)
