"""Layers that pass a state on: bytes by length, time against one process, and a billion tokens.

`bytes`: what each virtual rank sends for one layer of Qwen3.5, forward and backward, by length.
`memory`: peak of a rank in one gated delta net of transformers, forward and backward, on 1, 2 and 4 ranks.
`time`: one gated delta net of transformers on two ranks and on one process, forward and backward, in turns.
`stream`: a layer with a short convolution and Mamba 2's scan over virtual ranks, whose tokens are made where
they are used. Rows are compared with the recurrence in float64, token by token.

Example:
    python tools/bench_scan.py bytes
    python tools/bench_scan.py memory --tokens 16384
    python tools/bench_scan.py time --tokens 65536
    python tools/bench_scan.py stream --tokens 1073741824 --ranks 1024
"""

from __future__ import annotations

import os
import resource
import statistics
import sys
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from bench import in_turns, parser_of, print_row
from torch import Tensor

from ds_ring import Causal, RingConfig, RingMesh, make_layout
from ds_ring.integrations.deepspeed.batch import SHARDING
from ds_ring.integrations.deepspeed.batch_sharding import BatchSharding
from ds_ring.integrations.transformers.variants.recurrent.layers import wrap_functions
from ds_ring.layers.scan.sequence_runs import sequence_runs
from ds_ring.masks.layer_patterns import LayerPatterns
from ds_ring.masks.tiles import IntArray
from ds_ring.ring.trace import measure_cpu_memory
from ds_ring.schedule.layout import Layout
from ds_ring.simulation.simulate import virtual_halo, virtual_scan
from ds_ring_launcher.run.local_ranks import run_ranks

WIDTH = 4  # of the convolutions
# Keep memory that was used once: new pages for each large tensor take 70 % of the seconds at 64 Ki tokens.
KEEP_PAGES = {
    "MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 35), "MALLOC_TOP_PAD_": str(1 << 28),
}  # fmt: skip


def print_bytes(ranks: int, lengths: list[int]) -> None:
    """Print what a rank sends at most in a layer of Qwen3.5: 32 heads of 128 x 128, 8192 channels."""
    heads, dim, channels = 32, 128, 8192
    for tokens in lengths:
        layout = make_layout("zigzag", tokens=tokens, ring_size=ranks)
        runs = [len(sequence_runs(layout).of_rank(rank)) for rank in range(ranks)]
        states = [torch.zeros(count, 1, heads, dim, dim) for count in runs]
        passes = [virtual_scan(layout, states, states, matrix=True, reverse=back) for back in (False, True)]
        halos = virtual_halo(
            layout, lambda _, slots: torch.zeros(len(slots), channels, dtype=torch.bfloat16), WIDTH - 1
        )
        scan = max(map(sum, zip(*(one.bytes_sent for one in passes), strict=True)))
        row = {"ranks": ranks, "tokens": tokens, "scan_bytes": scan, "halo_bytes": 2 * max(halos.bytes_sent)}
        print_row(row | {"hidden_states_bytes": tokens // ranks * channels * 2})


def layer_of(asked: dict[str, int]) -> Any:
    """Return a gated delta net of transformers, the same in every process."""
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

    torch.manual_seed(0)
    config: Any = Qwen3_5TextConfig(
        hidden_size=asked["hidden"], linear_num_key_heads=asked["heads"],
        linear_num_value_heads=asked["heads"], linear_key_head_dim=asked["head_dim"],
        linear_value_head_dim=asked["head_dim"], num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
    )  # fmt: skip
    return Qwen3_5GatedDeltaNet(config, 0)


def sharded(asked: dict[str, int], mesh: RingMesh) -> tuple[Any, Layout, BatchSharding]:
    """Return the layer, the layout and the sharding that tells the layer of its ring."""
    layer = layer_of(asked)
    wrap_functions(layer)
    layout = make_layout("zigzag", tokens=asked["tokens"], ring_size=mesh.ring_size)
    config = RingConfig(ring_size=mesh.ring_size, hop_timeout_seconds=300.0)
    return layer, layout, BatchSharding(config, layout, mesh, LayerPatterns(Causal(), {}))


def peak_on_ranks(asked: dict[str, int]) -> int:
    """Return the peak bytes of one forward and backward pass on this rank."""
    layer, layout, sharding = sharded(asked, RingMesh.from_world(dist.get_world_size()))
    with measure_cpu_memory() as memory:
        x = torch.randn(1, layout.local_tokens, asked["hidden"])
        layer(x, **{SHARDING: sharding}).sum().backward()
    return memory.peak_bytes


def time_on_ranks(asked: dict[str, int]) -> dict[str, list[float]]:
    """Return seconds of the slowest rank by contestant: the ring, and this process alone (rank 0)."""
    mesh = RingMesh.from_world(2)
    layer, layout, sharding = sharded(asked, mesh)
    whole = torch.randn(1, asked["tokens"] if mesh.ring_rank == 0 else 1, asked["hidden"])
    local = torch.randn(1, layout.local_tokens, asked["hidden"])

    def run(x: Tensor, **more: Any) -> float:
        dist.barrier()
        begun = time.perf_counter()
        if x.shape[1] > 1:
            layer(x, **more).sum().backward()
        seconds = torch.tensor(time.perf_counter() - begun)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        layer.zero_grad()
        return float(seconds)

    works = {"ring of 2": lambda: run(local, **{SHARDING: sharding}), "one process": lambda: run(whole)}
    return in_turns(works, asked["rounds"])


def values(positions: IntArray, seed: int, count: int) -> Tensor:
    """Return numbers in [-1, 1) made from positions, [n, count] float32: the same wherever they are made."""
    x: Any = positions.astype(np.uint64)[:, None] * np.uint64(count + 1) + np.arange(count, dtype=np.uint64)
    x = (x + np.uint64(seed)) * np.uint64(0x9E3779B97F4A7C15)
    x ^= x >> np.uint64(29)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    return torch.from_numpy(((x >> np.uint64(40)).astype(np.float32) / (1 << 23)) - 1)


class Hybrid:
    """A layer of one head: values, keys, queries and a step size of each token are convolved and scanned."""

    states, head_dim = 4, 4
    channels = head_dim + 2 * states

    def __init__(self) -> None:
        self.weight = values(np.arange(WIDTH), 7, self.channels).T.contiguous()  # [C, width]
        self.rate = torch.tensor([-0.7])

    def inputs(self, positions: IntArray) -> Tensor:
        """Return [n, C]; zeros in front of the sequence."""
        return values(positions.clip(0), 1, self.channels) * torch.from_numpy(positions >= 0)[:, None]

    def steps(self, positions: IntArray) -> Tensor:
        """Return step sizes [n] in [0.001, 0.101)."""
        return (values(positions, 2, 1)[:, 0] + 1) / 20 + 0.001

    def block(self, front: Tensor, positions: IntArray) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return outputs [n, P], C_t times the decay since the block began [n, N], final B [P, N] and M [].

        Args:
            front: the tokens before the block, [width - 1, C].
            positions: consecutive.
        """
        from transformers.models.mamba2.modeling_mamba2 import causal_conv1d_fn, mamba2_chunk_scan

        x = torch.cat([front, self.inputs(positions)])
        x = causal_conv1d_fn(x.T[None], self.weight, None, activation="silu")[0].T[WIDTH - 1 :]
        v, b, c = x.split([self.head_dim, self.states, self.states], dim=1)
        dt = self.steps(positions)
        out, final = mamba2_chunk_scan(
            v[None, :, None], dt[None, :, None], self.rate, b[None, :, None], c[None, :, None], chunk_size=16,
            return_final_states=True,
        )  # fmt: skip
        decay = torch.exp((self.rate * dt.double()).cumsum(0)).float()
        return out[0, :, 0], c * decay[:, None], final[0, 0], decay[-1]

    def exact(self, position: int, span: int = 4096) -> Tensor:
        """Return the outputs [P] of one token by the recurrence in float64."""
        positions = np.arange(max(0, position - span), position + 1)
        x = torch.cat(
            [self.inputs(positions[0] - np.arange(WIDTH - 1, 0, -1)), self.inputs(positions)]
        ).double()
        terms = [self.weight[:, i].double() * x[i : i + len(positions)] for i in range(WIDTH)]
        v, b, c = F.silu(torch.stack(terms).sum(0)).split([self.head_dim, self.states, self.states], dim=1)
        dt, state = (
            self.steps(positions).double(),
            torch.zeros(self.head_dim, self.states, dtype=torch.float64),
        )
        for t in range(len(positions)):
            state = state * torch.exp(self.rate.double() * dt[t]) + dt[t] * v[t, :, None] * b[t]
        return state @ c[-1]


def stream(tokens: int, ranks: int, block: int, rows: int) -> None:
    """Run the layer over all tokens, and print the sum of its outputs and the error of some rows."""
    layer, layout, begun = (
        Hybrid(),
        make_layout("zigzag", tokens=tokens, ring_size=ranks),
        time.perf_counter(),
    )
    runs = sequence_runs(layout)
    positions = {rank: runs.of_rank(rank) for rank in range(ranks)}

    def tokens_of(rank: int, slots: IntArray) -> Tensor:
        run = positions[rank][np.searchsorted(runs.slots[positions[rank]], slots, side="right") - 1]
        return layer.inputs(runs.starts[run] + slots - runs.slots[run])

    halos = virtual_halo(layout, tokens_of, WIDTH - 1)
    moves, finals, sums, reach_sums = ([] for _ in range(4))
    for rank in range(ranks):
        of_rank: list[list[Tensor]] = [[], []]
        for place, run in enumerate(positions[rank].tolist()):
            front, move = halos.tensors[rank][place], torch.ones(())
            final, total = torch.zeros(layer.head_dim, layer.states), torch.zeros(layer.head_dim).double()
            reached = torch.zeros(layer.states).double()
            start = int(runs.starts[run])
            for first in range(start, start + int(runs.lengths[run]), block):
                here = np.arange(first, min(first + block, start + int(runs.lengths[run])))
                out, reach, last, decay = layer.block(front, here)
                total += out.double().sum(0) + (final @ reach.sum(0)).double()
                reached += (move * reach).double().sum(0)
                final, move = decay * final + last, decay * move
                front = layer.inputs(here[-WIDTH + 1 :])
            of_rank[0].append(move.reshape(1, 1))
            of_rank[1].append(final)
            sums.append(total)
            reach_sums.append(reached)
        moves.append(torch.stack(of_rank[0]))
        finals.append(torch.stack(of_rank[1]))
        if rank % max(1, ranks // 16) == 0:
            print(f"rank {rank} of {ranks}, {time.perf_counter() - begun:.0f} s", file=sys.stderr, flush=True)
    states = virtual_scan(layout, moves, finals)
    flat = torch.cat(states.tensors)
    total = sum(sums) + torch.einsum("rpn,rn->p", flat.double(), torch.stack(reach_sums))
    worst, where = 0.0, np.random.default_rng(0).integers(0, tokens, rows)
    # Rows just behind a border of runs depend on the scan and the halo most.
    for position in [*where.tolist(), *(runs.starts[1 :: max(1, len(runs.starts) // rows)] + 1).tolist()]:
        run = int(np.searchsorted(runs.starts, position, side="right")) - 1
        rank, start = int(runs.ranks[run]), int(runs.starts[run])
        place = positions[rank].tolist().index(run)
        first = max(start, position - 4096)
        state = states.tensors[rank][place] if first == start else torch.zeros(layer.head_dim, layer.states)
        front = (
            halos.tensors[rank][place]
            if first == start
            else layer.inputs(np.arange(first - WIDTH + 1, first))
        )
        out, reach, _, _ = layer.block(front, np.arange(first, position + 1))
        found, exact = (out[-1] + state @ reach[-1]).double(), layer.exact(position)
        worst = max(worst, float((found - exact).norm() / exact.norm()))
    print_row({
        "tokens": tokens, "ranks": ranks, "seconds": round(time.perf_counter() - begun),
        "peak_rss_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        "sum_of_outputs": [float(f"{x:.10g}") for x in total.tolist()], "rows": rows, "largest_error": worst,
        "scan_bytes": max(states.bytes_sent), "halo_bytes": max(halos.bytes_sent),
    })  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    """Run one of the four."""
    parser = parser_of(
        __doc__, tokens=(1 << 16, "of time and stream"), ranks=(8, "virtual ranks, of bytes and stream"),
        lengths=([1 << 12, 1 << 16, 1 << 20], "of bytes"), rounds=(3, "of time"), hidden=512, heads=4,
        head_dim=64, block=(4096, "of stream: tokens computed at once"),
        rows=(32, "of stream: rows checked"),
    )  # fmt: skip
    parser.add_argument("what", choices=["bytes", "memory", "time", "stream"])
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    names = ("tokens", "hidden", "heads", "head_dim", "rounds")
    given = {name: getattr(asked, name) for name in names}
    if asked.what == "memory":
        for size in (1, 2, 4):
            peaks = run_ranks(peak_on_ranks, size, (given,), threads=1, deadline_s=580)
            print_row({"tokens": asked.tokens, "ranks": size, "peak_mib": round(max(peaks) / 2**20, 1)})
    elif asked.what == "bytes":
        print_bytes(asked.ranks, asked.lengths)
    elif asked.what == "stream":
        stream(asked.tokens, asked.ranks, asked.block, asked.rows)
    else:
        os.environ.update(KEEP_PAGES)  # glibc reads them when the ranks start
        found = run_ranks(time_on_ranks, 2, (given,), threads=1, deadline_s=580)[0]
        seconds = {name: statistics.median(times) for name, times in found.items()}
        ratio = seconds["ring of 2"] / seconds["one process"]
        print_row({**given, **{name: round(x, 3) for name, x in seconds.items()}, "ratio": round(ratio, 3)})


if __name__ == "__main__":
    main()
