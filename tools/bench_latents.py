"""Multi-head latent attention on a ring: latents on the wire, expanded keys, and absorbed projections.

The three take turns on the same ranks: latents (`up_projection`), keys and values that every rank expands
before they travel, and the up-projection absorbed into queries and outputs, so that the ring attends among
latents. Printed are seconds of a forward and of a backward pass (medians of the slowest rank), the payload
that a rank sent, and the relative difference of the output from that of the expanded keys. Default sizes are
DeepSeek V3's, with fewer heads, which all three are proportional to, but for the latents' bytes.

Example:
    python tools/bench_latents.py --tokens 2048 --heads 16 --rounds 5
"""

from __future__ import annotations

import statistics
import sys
import time
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from bench import in_turns, parser_of, print_row
from torch import Tensor
from torch.nn.functional import linear

from ds_ring import Causal, RingMesh, make_layout
from ds_ring.layers.latents.latent_op import latent_attention_op
from ds_ring.ops.context import RingContext
from ds_ring.ops.options import Options
from ds_ring.ops.ring_op import ring_attention_op
from ds_ring_launcher.run.local_ranks import run_ranks

OPTIONS: dict[str, Any] = {
    "ranks": 2, "tokens": 2048, "heads": 16, "nope": 128, "rope": 64, "value": 128, "latent": 512,
    "rounds": 5,
}  # fmt: skip


def latents(x: list[Tensor], context: RingContext, heads: int) -> Tensor:
    q, latent, rope, up = x
    out: Tensor = latent_attention_op(q, latent, rope, up, context.handle)[0]
    return out


def expanded(x: list[Tensor], context: RingContext, heads: int) -> Tensor:
    q, latent, rope, up = x
    both = linear(latent[:, 0], up).unflatten(-1, (heads, -1)).transpose(1, 2)
    nope = q.shape[-1] - rope.shape[-1]
    k = torch.cat([both[..., :nope], rope.expand(-1, heads, -1, -1)], dim=-1)
    out: Tensor = ring_attention_op(q, k, both[..., nope:], context.handle)[0]
    return out


def absorbed(x: list[Tensor], context: RingContext, heads: int) -> Tensor:
    q, latent, rope, up = x
    nope = q.shape[-1] - rope.shape[-1]
    by_head = up.unflatten(0, (heads, -1))
    inner = torch.matmul(q[..., :nope], by_head[:, :nope])
    wide = torch.cat([inner, q[..., nope:]], dim=-1)
    out: Tensor = ring_attention_op(wide, torch.cat([latent, rope], dim=-1), latent, context.handle)[0]
    return torch.matmul(out, by_head[:, nope:].transpose(1, 2))


def measure(o: dict[str, int]) -> dict[str, Any]:
    world_size, rank = dist.get_world_size(), dist.get_rank()
    mesh = RingMesh.from_world(world_size)
    layout = make_layout("zigzag", tokens=o["tokens"], ring_size=world_size)
    torch.manual_seed(rank)
    slots, heads, width = layout.local_tokens, o["heads"], o["nope"] + o["rope"]
    shapes = ((1, heads, slots, width), (1, 1, slots, o["latent"]), (1, 1, slots, o["rope"]))
    given = [torch.randn(shape).requires_grad_() for shape in shapes]
    torch.manual_seed(0)
    up = torch.randn(heads * (o["nope"] + o["value"]), o["latent"]) * o["latent"] ** -0.5
    given.append(up.requires_grad_())
    ways = {"latents": latents, "expanded": expanded, "absorbed": absorbed}
    contexts = {name: RingContext(Causal(), layout, mesh, Options(scale=width**-0.5)) for name in ways}
    outs: dict[str, Tensor] = {}

    def one(name: str) -> tuple[float, float, int]:
        context = contexts[name]
        assert context.exchange is not None
        before = context.exchange.counters.bytes_sent
        dist.barrier()
        start = time.perf_counter()
        out = ways[name](given, context, heads)
        middle = time.perf_counter()
        torch.autograd.grad(out, given, out.detach())
        end = time.perf_counter()
        outs[name] = out.detach()
        return middle - start, end - middle, context.exchange.counters.bytes_sent - before

    found = in_turns({name: partial(one, name) for name in ways}, o["rounds"])
    scale = outs["expanded"].abs().max()
    errors = {name: float((out - outs["expanded"]).abs().max() / scale) for name, out in outs.items()}
    return {"found": found, "errors": errors}


def main(arguments: list[str] | None = None) -> int:
    options = vars(parser_of(__doc__, **OPTIONS).parse_args(arguments))
    ranks = run_ranks(measure, options["ranks"], (options,), threads=1, deadline_s=3600)
    for name in ranks[0]["found"]:
        rounds = list(zip(*(rank["found"][name] for rank in ranks), strict=True))
        forward, backward = (statistics.median(max(r[i] for r in one) for one in rounds) for i in (0, 1))
        print_row(
            {
                "way": name,
                "forward_s": round(forward, 3),
                "backward_s": round(backward, 3),
                "sent_mb": round(rounds[0][0][2] / 1e6, 2),
                "error": max(rank["errors"][name] for rank in ranks),
            }
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
