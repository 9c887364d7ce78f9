"""Peak tensor memory per rank, forward + backward, against ring size: real gloo ranks, and fake ones.

Example:
    python tools/measure_memory.py --tokens 32768 --ring-sizes 1 2 4 8
    python tools/measure_memory.py --fake --local-tokens 1048576 --ring-sizes 8 64 1024

The unit of the last column is one local tensor [1, heads, tokens / P, head_dim]; q, k, v, their gradients,
the output and its gradient are 8 units. A constant number of units is memory that falls as 1/P.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.spawn import spawn

from ds_ring import Causal, RingMesh, make_layout, ring_attention
from ds_ring.runtime.autograd import _pass_of
from ds_ring.runtime.context import Options, context_for
from ds_ring.runtime.trace import fake_memory_peak, measure_cpu_memory, shard_unit_bytes
from ds_ring.schedule.layout import Layout

# one call per tile: the smallest number of fake operators, and the largest workspace a kernel could have
WHOLE_TILES = (("block", 1 << 40), ("triangle", 1 << 40))


def real_rank(
    rank: int, size: int, store: str, options: argparse.Namespace, transport: str, out: str
) -> None:
    """One gloo rank: forward + backward under the profiler, peak to a file."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", f"file://{store}", rank=rank, world_size=size, timeout=timedelta(minutes=5)
    )
    mesh = RingMesh.from_world(size)
    layout = make_layout("zigzag", tokens=options.tokens, ring_size=size)
    with measure_cpu_memory() as memory:
        shape = (1, options.heads, layout.local_tokens, options.head_dim)
        q, k, v = (torch.randn(shape, requires_grad=True) for _ in range(3))
        result = ring_attention(q, k, v, pattern=Causal(), layout=layout, mesh=mesh, transport=transport)
        result.backward(torch.randn_like(result))
    Path(f"{out}.{rank}").write_text(str(memory.peak_bytes))
    dist.barrier()
    dist.destroy_process_group()


def measure_real(size: int, transport: str, options: argparse.Namespace) -> int:
    """The largest per-rank peak of a real run, bytes."""
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/peak"
        spawn(real_rank, (size, f"{folder}/store", options, transport, out), nprocs=size)
        return max(int(Path(f"{out}.{rank}").read_text()) for rank in range(size))


def fake_pass(layout: Layout, mesh: RingMesh, options: argparse.Namespace) -> list[torch.Tensor]:
    """The operator's own Python body over fake tensors: forward, then backward."""
    context = context_for(Causal(), layout, mesh, Options(kernel="cpu", kernel_options=WHOLE_TILES))
    shape = (1, options.heads, layout.local_tokens, options.head_dim)
    q, k, v = (torch.empty(shape) for _ in range(3))
    out, lse = _pass_of(q, k, v, context).forward(q, k, v)
    grad = torch.empty(shape)
    return [out, lse, grad, *_pass_of(q, k, v, context, grad).backward(grad, q, k, v, out, lse)]


def measure_fake(size: int, options: argparse.Namespace) -> int:
    """Peak bytes of rank 0 of `size` with fake tensors and a fake process group."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        mesh = RingMesh.from_world(size)
        layout = make_layout("zigzag", tokens=options.local_tokens * size, ring_size=size)
        with FakeTensorMode():
            return fake_memory_peak(lambda: fake_pass(layout, mesh, options))
    finally:
        dist.destroy_process_group()


def main(arguments: list[str] | None = None) -> int:
    """Print one row per ring size and transport."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=32768, help="global tokens T of a real run")
    parser.add_argument("--local-tokens", type=int, default=1 << 20, help="tokens per rank of a fake run")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--ring-sizes", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--transports", nargs="+", default=["ring", "all_gather"])
    parser.add_argument(
        "--fake", action="store_true", help="rank 0 of a fake process group, nothing allocated"
    )
    parser.add_argument("--json", action="store_true", help="one JSON row per line")
    options = parser.parse_args(arguments)
    for size in options.ring_sizes:
        for transport in ["ring"] if options.fake else options.transports:
            peak = measure_fake(size, options) if options.fake else measure_real(size, transport, options)
            local = options.local_tokens if options.fake else -(-options.tokens // size)
            unit = shard_unit_bytes(1, options.heads, local, options.head_dim, torch.float32)
            row = {"ring_size": size, "transport": transport, "peak_mib": round(peak / 2**20, 1)}
            row |= {"shard_units": round(peak / unit, 2), "fake": options.fake}
            text = (
                json.dumps(row) if options.json else "  ".join(f"{key} {value}" for key, value in row.items())
            )
            print(text, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
