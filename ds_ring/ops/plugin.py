"""The rows of this folder: what others find by its names."""

from __future__ import annotations

from ds_ring.kernels.reference import ReferenceKernel
from ds_ring.masks.catalog import Chunked, PrefixLM
from ds_ring.ops.ring_op import make_pass
from ds_ring.plugin import KernelRow, LayoutRow, PassRow, PayloadRow, Plugin
from ds_ring.schedule.choose import make_auto
from ds_ring.schedule.layout import make_contiguous, make_striped, make_zigzag

PLUGIN = Plugin(
    layouts={
        "auto": LayoutRow(home=make_auto),
        "contiguous": LayoutRow(home=make_contiguous),
        "zigzag": LayoutRow(home=make_zigzag),
        "striped": LayoutRow(home=make_striped),
    },
    kernels={"reference": KernelRow(home=ReferenceKernel, takes_scores=True)},
    patterns={"Chunked": Chunked, "PrefixLM": PrefixLM},
    passes={"ring": PassRow(home=make_pass)},
    gradient_payloads={"float32": PayloadRow(4), "bfloat16": PayloadRow(2, exact=False)},
)
