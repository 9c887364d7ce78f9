"""A request, and a machine that nobody had to measure."""

from __future__ import annotations

from typing import Any

from ds_ring_launcher.tune.measurements import KernelRate, Links, Measured
from ds_ring_launcher.tune.request import TuningRequest, request_from


def request(world_size: int = 2, tokens: int = 8192, heads: int = 4, **more: Any) -> TuningRequest:
    """Causal by default; `section` is the "ring_attention" section."""
    whole = {"ring_attention": more.pop("section", {})}
    return request_from(whole, tokens=tokens, heads=heads, head_dim=64, world_size=world_size, **more)


def machine(**more: Any) -> Measured:
    """50 GFLOP/s of the kernel, 1 GB/s."""
    values: dict[str, Any] = {
        "kernel": KernelRate(50e9, 50e9, 1e-4), "matmul_flops": 100e9, "links": Links(1e9, 1e9, 1e-4),
        "hop_overhead_s": 1e-3, "pass_s": 2.0, "ranks_per_node": 2,
    }  # fmt: skip
    return Measured(**(values | more))
