"""The rows of this folder: what others find by its names."""

from __future__ import annotations

from ds_ring.plugin import PassRow, Plugin
from ds_ring.transports.pull.signals import PullExchange, make_pass

PLUGIN = Plugin(
    order=10,
    passes={
        "pull": PassRow(
            home=make_pass, exchange=PullExchange, no_offload="needs them on the device", shares_memory=True
        )
    },
)
