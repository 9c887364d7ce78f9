"""ds_ring against a public dilated attention, `dilated-attention-pytorch`, on that package's own pattern.

There every head has one branch: group i of the heads attends within segments of w_i to each r_i-th position,
at the offset i mod r_i. It needs xformers, which has no CPU build: SDPA stands in for it. Its outputs are
divided by their sum over the sequence; ours are divided here as well, and both are compared before timing.

    pip install --no-deps dilated-attention-pytorch einops

Example:
    OMP_NUM_THREADS=1 python tools/bench_dilated_peer.py --tokens 16384 65536 --rounds 5
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from functools import partial

import torch
from bench import in_turns, parser_of, print_row
from contestants import Attend, lend_xformers
from torch import Tensor

from ds_ring import Dilated, RingMesh, make_layout, ring_attention
from ds_ring.masks.catalog import HeadsOfPart

HEADS_PER_BRANCH = 2


def branches(tokens: int) -> tuple[list[int], list[int]]:
    """Segments of 2048 and up to the whole sequence, each as dense as the other."""
    lengths = [2048 << i for i in range(5) if 2048 << i <= tokens]
    return lengths, [1 << i for i in range(len(lengths))]


def theirs(tokens: int, causal: bool) -> Attend:
    """q, k, v: [b, n, h, d]."""
    lend_xformers()
    from dilated_attention_pytorch.dilated_attention import DilatedAttention

    attention = DilatedAttention(*branches(tokens))
    return lambda q, k, v: attention(q, k, v, is_causal=causal)


def ours(tokens: int, causal: bool) -> Attend:
    """The same, head group by head group."""
    lengths, rates = branches(tokens)
    layout, mesh = make_layout("contiguous", tokens=tokens, ring_size=1), RingMesh.single()
    parts = len(lengths)
    patterns = [
        # the offset of every head of group i is i mod r_i: that of head i where each part has one head
        HeadsOfPart(Dilated((length,), (rate,), causal, "paper"), part, parts)
        for part, (length, rate) in enumerate(zip(lengths, rates, strict=True))
    ]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        groups = []
        for part, pattern in enumerate(patterns):
            heads = slice(part * HEADS_PER_BRANCH, (part + 1) * HEADS_PER_BRANCH)
            as_batch = (x[0, :, heads].transpose(0, 1).unsqueeze(1) for x in (q, k, v))
            out = ring_attention(*as_batch, pattern=pattern, layout=layout, mesh=mesh)
            groups.append(out / out.sum(dim=2, keepdim=True))
        return torch.cat(groups).transpose(0, 1).transpose(1, 2) / parts

    return attend


def seconds_of(attend: Attend, inputs: list[Tensor]) -> tuple[float, list[Tensor]]:
    """Forward + backward, and the results."""
    *leaves, grad = (x.detach().clone() for x in inputs)
    for x in leaves:
        x.requires_grad_()
    started = time.process_time()
    out = attend(*leaves)
    out.backward(grad)
    taken = time.process_time() - started
    return taken, [out.detach(), *(x.grad for x in leaves if x.grad is not None)]


def row_of(tokens: int, causal: bool, options: argparse.Namespace) -> dict[str, object]:
    """Medians of interleaved rounds, and the largest relative difference of out and gradients."""
    generator = torch.Generator().manual_seed(0)
    heads = HEADS_PER_BRANCH * len(branches(tokens)[0])
    shape = (1, tokens, heads, options.head_dim)
    inputs = [torch.rand(shape, generator=generator) for _ in range(4)]  # positive: sums far from 0
    ways = {"theirs": theirs(tokens, causal), "ours": ours(tokens, causal)}
    results = {name: seconds_of(attend, inputs)[1] for name, attend in ways.items()}
    pairs = zip(results["ours"], results["theirs"], strict=True)
    difference = max(float((x - y).abs().max() / y.abs().max()) for x, y in pairs)
    passes = {name: partial(seconds_of, attend, inputs) for name, attend in ways.items()}
    times = {name: [one for one, _ in found] for name, found in in_turns(passes, options.rounds).items()}
    row: dict[str, object] = {"tokens": tokens, "causal": causal, "heads": heads}
    row |= {f"{name}_cpu_s": round(statistics.median(taken), 3) for name, taken in times.items()}
    ratios = (mine / other for mine, other in zip(times["ours"], times["theirs"], strict=True))
    return row | {"ratio": round(statistics.median(ratios), 3), "difference": difference}


def main(arguments: list[str] | None = None) -> int:
    """One row per length and direction."""
    options = parser_of(__doc__, tokens=[16384], head_dim=64, rounds=5).parse_args(arguments)
    torch.set_num_threads(1)
    for tokens in options.tokens:
        for causal in (True, False):
            print_row(row_of(tokens, causal, options))
    return 0


if __name__ == "__main__":
    sys.exit(main())
