"""The rows of this folder: what others find by its names."""

from __future__ import annotations

from ds_ring.kernels.cpu.kernel import CpuKernel
from ds_ring.kernels.cpu.workspace import get_cpu_bytes
from ds_ring.plugin import KernelRow, Plugin

PLUGIN = Plugin(
    order=10,
    kernels={"cpu": KernelRow(home=CpuKernel, device="cpu", workspace=get_cpu_bytes)},
)
