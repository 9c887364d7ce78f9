"""The rows of this folder: what others find by its names."""

from __future__ import annotations

from ds_ring.decode.selection.few_queries import attend_for_all, greatest_for_all, select_for_all
from ds_ring.plugin import Plugin

PLUGIN = Plugin(
    order=50,
    requires=("decode", "layers/selection"),
    hooks={
        "select_for_all": select_for_all,
        "greatest_for_all": greatest_for_all,
        "attend_for_all": attend_for_all,
    },
)
