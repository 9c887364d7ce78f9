"""Peak tensor memory per rank, forward + backward, against ring size: real gloo ranks, and fake ones.

Example:
    python tools/measure_memory.py --tokens 32768 --ring-sizes 1 2 4 8
    python tools/measure_memory.py --fake --local-tokens 1048576 --ring-sizes 8 64 1024

The unit of the last column is one local tensor [1, heads, tokens / P, head_dim]; q, k, v, their gradients,
the output and its gradient are 8 units. A constant number of units is memory that falls as 1/P.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
import torch.distributed as dist
from common import fake_mesh, make_parser, print_row
from torch._subclasses.fake_tensor import FakeTensorMode

from ds_ring import Causal, PassOptions, RingMesh, make_layout, ring_attention
from ds_ring.measure.memory import fake_memory_peak, measure_cpu_memory, shard_unit_bytes
from ds_ring.ops.context import make_ring_context
from ds_ring.ops.options import Options
from ds_ring.ops.ring_op import run_backward, run_forward
from ds_ring_launcher.run.local_ranks import run_ranks

# one call per tile: the smallest number of fake operators, and the largest workspace a kernel could have
WHOLE_TILES: dict[str, Any] = {"block": 1 << 40, "triangle": 1 << 40}


def real_rank(options: argparse.Namespace, transport: str) -> int:
    """One gloo rank: the peak of forward + backward under the profiler, bytes."""
    size = dist.get_world_size()
    mesh = RingMesh.from_world(size)
    layout = make_layout("zigzag", tokens=options.tokens, ring_size=size)
    with measure_cpu_memory() as memory:
        shape = (1, options.heads, layout.local_tokens, options.head_dim)
        q, k, v = (torch.randn(shape, requires_grad=True) for _ in range(3))
        how = PassOptions(transport=transport)
        result = ring_attention(q, k, v, pattern=Causal(), layout=layout, mesh=mesh, options=how)
        result.backward(torch.randn_like(result))
    return memory.peak_bytes


def measure_fake(size: int, options: argparse.Namespace) -> int:
    """Return the peak bytes of rank 0 of `size` with fake tensors and a fake process group."""
    with fake_mesh(0, size) as mesh:
        layout = make_layout("zigzag", tokens=options.local_tokens * size, ring_size=size)
        context = make_ring_context(Causal(), layout, mesh, Options(kernel="cpu", kernel_options=WHOLE_TILES))
        shape = (1, options.heads, layout.local_tokens, options.head_dim)

        def work() -> list[torch.Tensor]:
            """Run the operator's own Python body: forward, then backward."""
            q, k, v = (torch.empty(shape) for _ in range(3))
            out, lse = run_forward(context, q, k, v)
            grad = torch.empty(shape)
            return [out, lse, grad, *run_backward(context, grad, q, k, v, out, lse)]

        with FakeTensorMode():
            return fake_memory_peak(work)


def main(arguments: list[str] | None = None) -> int:
    """Print one row per ring size and transport."""
    parser = make_parser(
        __doc__, tokens=(32768, "global tokens T of a real run"), heads=8, head_dim=64,
        local_tokens=(1 << 20, "tokens per rank of a fake run"), ring_sizes=[1, 2, 4, 8],
        transports=["ring", "all_gather"], json=(False, "one JSON row per line"),
        fake=(False, "rank 0 of a fake process group, nothing allocated"),
        deadline=(600, "seconds for a real run"),
    )  # fmt: skip
    options = parser.parse_args(arguments)
    for size in options.ring_sizes:
        for transport in ["ring"] if options.fake else options.transports:
            if options.fake:
                peak, local = measure_fake(size, options), options.local_tokens
            else:
                ranks = run_ranks(
                    real_rank, size, (options, transport), threads=1, deadline_s=options.deadline
                )
                peak, local = max(ranks), -(-options.tokens // size)
            unit = shard_unit_bytes(1, options.heads, local, options.head_dim, torch.float32)
            row = {"ring_size": size, "transport": transport, "peak_mib": round(peak / 2**20, 1)}
            print_row(row | {"shard_units": round(peak / unit, 2), "fake": options.fake}, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
