"""The rows of this folder: what others find by its names."""

from __future__ import annotations

from ds_ring.plugin import PassRow, Plugin
from ds_ring.transports.reproducible.blocks import check_blocks
from ds_ring.transports.reproducible.few_queries import make_forward
from ds_ring.transports.reproducible.sharded import make_pass

PLUGIN = Plugin(
    order=20,
    passes={
        "reproducible": PassRow(
            home=make_pass,
            no_hops="passes nothing on",
            no_offload="takes all of them at once",
            no_hop_sums="adds the gradients of blocks in an order of its own",
            whole_blocks=True,
            checks_layout=check_blocks,
            few_queries=make_forward,
        )
    },
)
