"""The rows of this folder: what others find by its names."""

from __future__ import annotations

from ds_ring.kernels.flash.kernel import FlashKernel, refused
from ds_ring.kernels.flash.workspace import get_flash_bytes
from ds_ring.plugin import KernelRow, Plugin

PLUGIN = Plugin(
    order=30,
    kernels={
        "flash": KernelRow(
            home=FlashKernel,
            device="cuda",
            anywhere=True,
            first_for=("causal", "full", "window"),
            refuses=refused,
            workspace=get_flash_bytes,
        )
    },
)
