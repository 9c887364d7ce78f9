"""The rows of this folder: what others find by its names."""

from __future__ import annotations

from ds_ring.plugin import PassRow, Plugin
from ds_ring.transports.tiles.tile_pass import make_pass

PLUGIN = Plugin(
    order=30,
    passes={
        "tiles": PassRow(
            home=make_pass,
            no_hops="goes by tiles of its own",
            no_offload="takes all of them at once",
            no_hop_sums="adds gradients of other ranks' queries, too",
        )
    },
)
