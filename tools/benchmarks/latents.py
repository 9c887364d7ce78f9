"""Measure multi-head latent attention on a ring: latents on the wire, expanded keys, absorbed projections.

The three take turns on the same ranks: latents (`up_projection`), keys and values that every rank expands
before they travel, and the up-projection absorbed into queries and outputs, so that the ring attends among
latents. Reported are seconds of a forward and of a backward pass (medians of the slowest rank), the payload
that a rank sent, and the relative difference of the output from that of the expanded keys. Default sizes are
those of DeepSeek V3 with fewer heads; all but the bytes of latents are proportional to the heads.

Example:
    python tools/bench.py latents --tokens 2048 --heads 16 --rounds 5
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import linear

from benchmarks.measuring import ResultRow, Turns, bytes_sent, clock, make_ring, measure_on_ranks
from ds_ring import Causal, latent_attention, make_layout, ring_attention

OPTIONS = {
    "ranks": 2, "tokens": 2048, "heads": 16, "nope": 128, "rope": 64, "value": 128, "latent": 512,
    "rounds": 5,
}  # fmt: skip


def latents(attend: partial[Tensor], q: Tensor, latent: Tensor, rope: Tensor, up: Tensor) -> Tensor:
    """Send latents; the receiver expands them."""
    return latent_attention(q, latent, rope, up, **attend.keywords)


def expanded(attend: Callable[..., Tensor], q: Tensor, latent: Tensor, rope: Tensor, up: Tensor) -> Tensor:
    """Expand keys and values, and send these."""
    heads, nope = q.shape[1], q.shape[-1] - rope.shape[-1]
    both = linear(latent[:, 0], up).unflatten(-1, (heads, -1)).transpose(1, 2)
    k = torch.cat([both[..., :nope], rope.expand(-1, heads, -1, -1)], dim=-1)
    return attend(q, k, both[..., nope:])


def absorbed(attend: Callable[..., Tensor], q: Tensor, latent: Tensor, rope: Tensor, up: Tensor) -> Tensor:
    """Attend among latents: the up-projection is part of queries and outputs."""
    nope = q.shape[-1] - rope.shape[-1]
    by_head = up.unflatten(0, (q.shape[1], -1))
    inner = torch.matmul(q[..., :nope], by_head[:, :nope])
    out = attend(torch.cat([inner, q[..., nope:]], dim=-1), torch.cat([latent, rope], dim=-1), latent)
    return torch.matmul(out, by_head[:, nope:].transpose(1, 2))


WAYS = {"latents": latents, "expanded": expanded, "absorbed": absorbed}


def prepare(options: argparse.Namespace) -> Turns:
    """Return the three on this rank, and the differences of their outputs at the end."""
    mesh = make_ring()
    layout = make_layout("zigzag", tokens=options.tokens, ring_size=mesh.ring_size)
    torch.manual_seed(mesh.ring_rank)
    slots, heads, width = layout.local_tokens, options.heads, options.nope + options.rope
    shapes = ((1, heads, slots, width), (1, 1, slots, options.latent), (1, 1, slots, options.rope))
    leaves = [torch.randn(shape).requires_grad_() for shape in shapes]
    torch.manual_seed(0)
    up = torch.randn(heads * (options.nope + options.value), options.latent) * options.latent**-0.5
    leaves.append(up.requires_grad_())
    attend = partial(ring_attention, pattern=Causal(), layout=layout, mesh=mesh, scale=width**-0.5)
    outs: dict[str, Tensor] = {}

    def one(name: str) -> dict[str, float]:
        before = bytes_sent(mesh)
        with clock() as forward:
            out = WAYS[name](attend, *leaves)
        with clock(together=False) as backward:
            torch.autograd.grad(out, leaves, out.detach())
        outs[name] = out.detach()
        sent = bytes_sent(mesh) - before
        return {"forward_s": forward["wall_s"], "backward_s": backward["wall_s"], "sent": sent}

    def errors() -> dict[str, float]:
        expected = outs["expanded"]
        return {
            name: float((out - expected).abs().max() / expected.abs().max()) for name, out in outs.items()
        }

    return Turns({name: partial(one, name) for name in WAYS}, errors)


def run(options: argparse.Namespace) -> Iterator[ResultRow]:
    """Yield a row for each way."""
    measured = measure_on_ranks(prepare, options)
    for name in WAYS:
        results = {key: measured.median(name, key, 3) for key in ("forward_s", "backward_s")}
        results |= {"sent_mb": round(measured.each(name, "sent")[0] / 1e6, 2)}
        yield ResultRow({"way": name}, results | {"error": max(rank[name] for rank in measured.at_end)})
