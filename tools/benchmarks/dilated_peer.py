"""Measure ds_ring against `dilated-attention-pytorch`, on that package's own pattern, in one process.

There every head has one branch: group i of the heads attends within segments of w_i to each r_i-th position,
at the offset i mod r_i. It needs xformers, which has no CPU build: SDPA replaces it. Its outputs are divided
by their sum over the sequence; ours are divided here as well, and both are compared before timing.

    pip install --no-deps dilated-attention-pytorch einops

Example:
    python tools/bench.py dilated-peer --tokens 16384 65536 --rounds 5
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.contestants import lend_xformers
from benchmarks.measuring import Attend, ResultRow, forward_and_backward, measure_here, timed_pass
from ds_ring import Dilated, RingMesh, make_layout, ring_attention
from ds_ring.masks.catalog import HeadShard

HEADS_PER_BRANCH = 2
OPTIONS = {"tokens": [16384], "head_dim": 64, "rounds": 5}


def branches(tokens: int) -> tuple[list[int], list[int]]:
    """Return segments of 2048 and up to the whole sequence, each as dense as the other, and their rates."""
    lengths = [2048 << i for i in range(5) if 2048 << i <= tokens]
    return lengths, [1 << i for i in range(len(lengths))]


def theirs(tokens: int, causal: bool) -> Attend:
    """Return the peer's attention of q, k, v: [b, n, h, d]."""
    lend_xformers()
    from dilated_attention_pytorch.dilated_attention import DilatedAttention

    attention = DilatedAttention(*branches(tokens))
    return lambda q, k, v: attention(q, k, v, is_causal=causal)


def ours(tokens: int, causal: bool) -> Attend:
    """Return the same attention by ds_ring, head group by head group."""
    lengths, rates = branches(tokens)
    layout, mesh = make_layout("contiguous", tokens=tokens, ring_size=1), RingMesh.single()
    parts = len(lengths)
    patterns = [
        # the offset of every head of group i is i mod r_i: that of head i where each part has one head
        HeadShard(Dilated((length,), (rate,), causal, "paper"), part, parts)
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


def row_of(tokens: int, causal: bool, options: argparse.Namespace) -> ResultRow:
    """Compare both, then time them."""
    generator = torch.Generator().manual_seed(0)
    heads = HEADS_PER_BRANCH * len(branches(tokens)[0])
    shape = (1, tokens, heads, options.head_dim)
    inputs = [torch.rand(shape, generator=generator) for _ in range(4)]  # positive: sums far from 0
    ways = {"theirs": theirs(tokens, causal), "ours": ours(tokens, causal)}
    both = [forward_and_backward(ways[name], inputs) for name in ("ours", "theirs")]
    difference = max(float((x - y).abs().max() / y.abs().max()) for x, y in zip(*both, strict=True))
    found = measure_here(
        {name: partial(timed_pass, attend, inputs) for name, attend in ways.items()}, options
    )
    results = {f"{name}_cpu_s": found.median(name, "cpu_s", 3) for name in ways}
    results |= {"ratio": found.ratio("ours", "theirs", "cpu_s"), "difference": difference}
    return ResultRow({"tokens": tokens, "causal": causal, "heads": heads}, results)


def run(options: argparse.Namespace) -> Iterator[ResultRow]:
    """Yield a row for each length, causal and not."""
    for tokens in options.tokens:
        yield from (row_of(tokens, causal, options) for causal in (True, False))
