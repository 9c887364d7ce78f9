"""The rows of this folder: what others find by its names."""

from __future__ import annotations

from ds_ring.ops.ring_op import make_pass
from ds_ring.plugin import PassRow, Plugin
from ds_ring.transports.direct.choose import choose_plan
from ds_ring.transports.direct.plan import plan_for_bytes

PLUGIN = Plugin(
    order=50,
    passes={
        "direct": PassRow(home=make_pass, plans=plan_for_bytes),
        "fastest": PassRow(home=make_pass, plans=choose_plan),
    },
)
