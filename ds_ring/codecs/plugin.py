"""The rows of this folder: what others find by its names."""

from __future__ import annotations

from ds_ring.codecs.float8 import Float8Rows
from ds_ring.plugin import CodecRow, Plugin

PLUGIN = Plugin(
    order=10,
    kv_payloads={"float8": CodecRow(home=Float8Rows, element_bytes=1, row_bytes=1, exact=False)},
)
