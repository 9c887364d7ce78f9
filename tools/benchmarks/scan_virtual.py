"""Measure layers with a recurrent state on virtual ranks: bytes by length, and a billion tokens.

`scan-bytes`: the bytes that each rank sends for one layer of Qwen3.5, forward and backward, by length.
`scan-stream`: a layer with a short convolution and Mamba 2's scan, whose tokens are generated where they are
used. Some rows are compared with the recurrence in float64, token by token.

Example:
    python tools/bench.py scan-bytes
    python tools/bench.py scan-stream --tokens 1073741824 --ranks 1024
"""

from __future__ import annotations

import argparse
import resource
import sys
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks.hybrid_layer import WIDTH, HybridLayer
from benchmarks.measuring import ResultRow, clock
from ds_ring import make_layout
from ds_ring.layers.scan.sequence_runs import sequence_runs
from ds_ring.layers.scan.simulation import virtual_halo, virtual_scan
from ds_ring.masks.slots import IntArray
from ds_ring.schedule.layout import Layout

OPTIONS = {
    "tokens": (1 << 16, "of scan-stream"), "ranks": (8, "virtual ranks"),
    "lengths": ([1 << 12, 1 << 16, 1 << 20], "of scan-bytes"),
    "block": (4096, "of scan-stream: tokens computed at once"),
    "rows": (32, "of scan-stream: rows checked"),
}  # fmt: skip
MAX_ERROR = 1e-4  # of a row in float32


def count_bytes(options: argparse.Namespace) -> Iterator[ResultRow]:
    """Yield the most that a rank sends in a layer of Qwen3.5: 32 heads of 128 x 128, 8192 channels."""
    heads, dim, channels, ranks = 32, 128, 8192, options.ranks
    for tokens in options.lengths:
        layout = make_layout("zigzag", tokens=tokens, ring_size=ranks)
        runs = [len(sequence_runs(layout).list_rank_runs(rank)) for rank in range(ranks)]
        states = [torch.zeros(count, 1, heads, dim, dim) for count in runs]
        passes = [virtual_scan(layout, states, states, matrix=True, reverse=back) for back in (False, True)]
        halos = virtual_halo(
            layout, lambda _, slots: torch.zeros(len(slots), channels, dtype=torch.bfloat16), WIDTH - 1
        )
        scan = max(map(sum, zip(*(one.bytes_sent for one in passes), strict=True)))
        results = {"scan_bytes": scan, "halo_bytes": 2 * max(halos.bytes_sent)}
        results["hidden_states_bytes"] = tokens // ranks * channels * 2
        yield ResultRow({"ranks": ranks, "tokens": tokens}, results)


class RunResult(NamedTuple):
    """Hold the results of a run of consecutive tokens, computed as if the state before it were zero."""

    decay: Tensor  # of a state over the whole run, []
    final: Tensor  # state after the run, [P, N]
    total: Tensor  # sum of the outputs, [P], float64
    reach: Tensor  # sum of the factors by which the state before the run adds to the outputs, [N], float64


def compute_run(layer: HybridLayer, front: Tensor, start: int, end: int, block: int) -> RunResult:
    """Compute tokens start .. end - 1, block by block; `front` are the tokens before them."""
    decay, final = torch.ones(()), torch.zeros(layer.head_dim, layer.states)
    total, reach = torch.zeros(layer.head_dim).double(), torch.zeros(layer.states).double()
    for first in range(start, end, block):
        here = np.arange(first, min(first + block, end))
        out, factors, last, block_decay = layer.block(front, here)
        total += out.double().sum(0) + (final @ factors.sum(0)).double()
        reach += (decay * factors).double().sum(0)
        final, decay = block_decay * final + last, block_decay * decay
        front = layer.inputs(here[-WIDTH + 1 :])
    return RunResult(decay, final, total, reach)


class VirtualLayer:
    """Run a hybrid layer over all virtual ranks."""

    def __init__(self, layer: HybridLayer, layout: Layout, block: int) -> None:
        self.layer, self.layout, self.runs = layer, layout, sequence_runs(layout)
        self.of_rank = [self.runs.list_rank_runs(rank) for rank in range(layout.ring_size)]
        self.halos = virtual_halo(layout, self._tokens, WIDTH - 1)
        found = [
            [self._run(rank, index, run, block) for index, run in enumerate(numbers.tolist())]
            for rank, numbers in enumerate(tqdm(self.of_rank, desc="ranks", disable=not sys.stderr.isatty()))
        ]
        moves = [torch.stack([one.decay.reshape(1, 1) for one in rank]) for rank in found]
        self.states = virtual_scan(
            layout, moves, [torch.stack([one.final for one in rank]) for rank in found]
        )
        every = [one for rank in found for one in rank]
        states = torch.cat(self.states.tensors).double()
        self.total = sum(one.total for one in every) + torch.einsum(
            "rpn,rn->p", states, torch.stack([one.reach for one in every])
        )

    def _run(self, rank: int, index: int, run: int, block: int) -> RunResult:
        start, length = int(self.runs.starts[run]), int(self.runs.lengths[run])
        return compute_run(self.layer, self.halos.tensors[rank][index], start, start + length, block)

    def _tokens(self, rank: int, slots: IntArray) -> Tensor:
        numbers = self.of_rank[rank]
        run = numbers[np.searchsorted(self.runs.slots[numbers], slots, side="right") - 1]
        return self.layer.inputs(self.runs.starts[run] + slots - self.runs.slots[run])

    def error(self, position: int) -> float:
        """Return the relative error of one token's outputs against the recurrence in float64."""
        run = int(np.searchsorted(self.runs.starts, position, side="right")) - 1
        rank, start = int(self.runs.ranks[run]), int(self.runs.starts[run])
        first = max(start, position - 4096)
        if first == start:
            index = self.of_rank[rank].tolist().index(run)
            state, front = self.states.tensors[rank][index], self.halos.tensors[rank][index]
        else:
            state = torch.zeros(self.layer.head_dim, self.layer.states)
            front = self.layer.inputs(np.arange(first - WIDTH + 1, first))
        out, factors, _, _ = self.layer.block(front, np.arange(first, position + 1))
        exact = self.layer.exact(position)
        return float(((out[-1] + state @ factors[-1]).double() - exact).norm() / exact.norm())


def stream(options: argparse.Namespace) -> Iterator[ResultRow]:
    """Yield the sum of the layer's outputs over all tokens, and the error of some rows."""
    tokens, rows = options.tokens, options.rows
    layout = make_layout("zigzag", tokens=tokens, ring_size=options.ranks)
    with clock() as taken:
        found = VirtualLayer(HybridLayer(tokens), layout, options.block)
    # Rows just after a border of runs depend on the scan and the halo most.
    borders = found.runs.starts[1 :: max(1, len(found.runs.starts) // rows)] + 1
    drawn = np.random.default_rng(0).integers(0, tokens, rows)
    error = max(found.error(position) for position in [*drawn.tolist(), *borders.tolist()])
    results = {
        "seconds_s": round(taken["wall_s"]),
        "peak_rss_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        "sum_of_outputs": [float(f"{x:.10g}") for x in found.total.tolist()], "rows": rows,
        "largest_error": error, "scan_bytes": max(found.states.bytes_sent),
        "halo_bytes": max(found.halos.bytes_sent),
    }  # fmt: skip
    wrong = f"expected errors below {MAX_ERROR:g}, got {error:.1e}" if error > MAX_ERROR else ""
    yield ResultRow({"tokens": tokens, "ranks": options.ranks}, results, wrong)
