"""The rows of this folder: what others find by its names."""

from __future__ import annotations

from ds_ring.kernels.flex.kernel import FlexKernel
from ds_ring.kernels.flex.layouts import rate_in_blocks
from ds_ring.kernels.flex.workspace import get_flex_bytes
from ds_ring.plugin import KernelRow, Plugin

PLUGIN = Plugin(
    order=20,
    kernels={
        "flex": KernelRow(
            home=FlexKernel,
            device="cuda",
            takes_blocks=True,
            rates_layouts=rate_in_blocks,
            takes_scores=True,
            workspace=get_flex_bytes,
        )
    },
)
