"""A request, and a machine that nobody had to measure."""

from __future__ import annotations

from typing import Any

from ds_ring_launcher.tune.candidates import candidates
from ds_ring_launcher.tune.measurements import KernelRate, Links
from ds_ring_launcher.tune.model import Measured
from ds_ring_launcher.tune.request import TuningRequest, request_from

Json = dict[str, Any]


def request(world_size: int = 2, tokens: int = 8192, heads: int = 4, **more: Any) -> TuningRequest:
    """Causal by default; `section` is the "ring_attention" section."""
    whole = {"ring_attention": more.pop("section", {})}
    return request_from(whole, tokens=tokens, heads=heads, head_dim=64, world_size=world_size, **more)


def machine(asked: TuningRequest, **more: Any) -> Measured:
    """50 GFLOP/s with every kernel, 1 GB/s, ranks that share nothing."""
    rate = KernelRate(50e9, 50e9, 1e-4, 1e-4)
    links = Links(1e9, 1e9, 1e-4, 1e9)
    values: Json = {"alone_speedup": 1.0, "matmul_flops": 100e9, "links": links, "hop_overhead_s": 1e-3}
    return Measured(kernels={one.kernel: rate for one in candidates(asked)}, **(values | more))
