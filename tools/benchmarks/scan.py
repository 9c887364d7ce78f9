"""Measure one gated delta net of transformers on a ring, forward and backward: memory, and time.

`scan-memory`: the peak of a rank on 1, 2 and 4 ranks. `scan-time`: two ranks against one process with one
thread, in turns.

Example:
    python tools/bench.py scan-memory --tokens 16384
    python tools/bench.py scan-time --tokens 65536
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.measuring import ResultRow, Turns, clock, make_ring, measure_on_ranks
from ds_ring import Causal, RingConfig, RingMesh, make_layout
from ds_ring.contrib.families.recurrent.layers import wrap_functions
from ds_ring.data.batch import SHARDING
from ds_ring.data.batch_sharding import BatchSharding
from ds_ring.data.layer_patterns import LayerPatterns
from ds_ring.measure.memory import measure_cpu_memory
from ds_ring.schedule.layout import Layout
from ds_ring_launcher.run.local_ranks import run_ranks

OPTIONS = {"tokens": 1 << 16, "hidden": 512, "heads": 4, "head_dim": 64, "rounds": 3}
# Keep memory that was used once: new pages for each large tensor take 70 % of the seconds at 64 Ki tokens.
KEEP_PAGES = {
    "MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 35), "MALLOC_TOP_PAD_": str(1 << 28),
}  # fmt: skip


def make_layer(options: argparse.Namespace) -> Any:
    """Return a gated delta net of transformers, the same in every process."""
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

    torch.manual_seed(0)
    config: Any = Qwen3_5TextConfig(
        hidden_size=options.hidden, linear_num_key_heads=options.heads,
        linear_num_value_heads=options.heads, linear_key_head_dim=options.head_dim,
        linear_value_head_dim=options.head_dim, num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
    )  # fmt: skip
    return Qwen3_5GatedDeltaNet(config, 0)


def sharded(options: argparse.Namespace, mesh: RingMesh) -> tuple[Any, Layout, BatchSharding]:
    """Return the layer, its layout, and the sharding that its forward method takes."""
    layer = make_layer(options)
    wrap_functions(layer)
    layout = make_layout("zigzag", tokens=options.tokens, ring_size=mesh.ring_size)
    config = RingConfig(ring_size=mesh.ring_size, hop_timeout_seconds=300.0)
    return layer, layout, BatchSharding(config, layout, mesh, LayerPatterns(Causal(), {}))


def measure_peak(options: argparse.Namespace) -> int:
    """Return the peak bytes of one forward and backward pass on this rank."""
    layer, layout, sharding = sharded(options, RingMesh.from_world(dist.get_world_size()))
    with measure_cpu_memory() as memory:
        x = torch.randn(1, layout.local_tokens, options.hidden)
        layer(x, **{SHARDING: sharding}).sum().backward()
    return memory.peak_bytes


def memory(options: argparse.Namespace) -> Iterator[ResultRow]:
    """Yield a row for 1, 2 and 4 ranks."""
    options.rounds = 1
    for size in (1, 2, 4):
        peaks = run_ranks(measure_peak, size, (options,), threads=1, deadline_s=580)
        yield ResultRow({"tokens": options.tokens, "ranks": size}, {"peak_mib": round(max(peaks) / 2**20, 1)})


def prepare(options: argparse.Namespace) -> Turns:
    """Return the layer on the ring, and the whole of it on rank 0."""
    mesh = make_ring()
    layer, layout, sharding = sharded(options, mesh)
    whole = torch.randn(1, options.tokens if mesh.ring_rank == 0 else 1, options.hidden)
    local = torch.randn(1, layout.local_tokens, options.hidden)

    def one_pass(x: Tensor, **keywords: Any) -> dict[str, float]:
        with clock() as taken:
            if x.shape[1] > 1:
                layer(x, **keywords).sum().backward()
        layer.zero_grad()
        return taken

    return Turns(
        {"ring": lambda: one_pass(local, **{SHARDING: sharding}), "one_process": lambda: one_pass(whole)}
    )


def time(options: argparse.Namespace) -> Iterator[ResultRow]:
    """Yield one row."""
    os.environ.update(KEEP_PAGES)  # glibc reads them when the ranks start
    options.ranks = 2
    measured = measure_on_ranks(prepare, options, deadline_s=580)
    results = {f"{name}_s": measured.median(name, "wall_s", 3) for name in measured.rounds}
    results["ratio"] = round(results["ring_s"] / results["one_process_s"], 3)
    yield ResultRow(
        {key: getattr(options, key) for key in ("tokens", "hidden", "heads", "head_dim")}, results
    )
