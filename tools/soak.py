"""Thousands of passes: memory, descriptors and threads stay flat, the last result has the first one's bits.

Then one hop of 512 MB, which must arrive bit for bit. Real gloo ranks.

Example:
    python tools/soak.py --passes 10000 --ranks 2 4
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from typing import Any

import psutil
import torch
import torch.distributed as dist
from common import make_parser, print_row
from torch import Tensor

from ds_ring import Causal, Dilated, RingMesh, make_layout, ring_attention
from ds_ring.comm.exchange import Exchange
from ds_ring.comm.messages import Message
from ds_ring_launcher.run.local_ranks import run_ranks

PATTERNS = (Causal(), Dilated((64, 256), (1, 2)))
WARM_UP = 0.1  # of the passes, before anything is called flat
LARGE_BYTES = 512 << 20


def hash_tensors(tensors: list[Tensor]) -> str:
    """The bits of some tensors."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def one_pass(mesh: RingMesh, tokens: int, number: int) -> str:
    """Forward and backward, always of the same tensors for the same pattern."""
    pattern = PATTERNS[number % len(PATTERNS)]
    layout = make_layout("zigzag", tokens=tokens, ring_size=mesh.ring_size)
    generator = torch.Generator().manual_seed(mesh.ring_rank)
    shape = (1, 4, layout.local_tokens, 32)
    q, k, v = (torch.randn(shape, generator=generator).requires_grad_() for _ in range(3))
    out = ring_attention(q, k, v, pattern=pattern, layout=layout, mesh=mesh)
    return hash_tensors([out, *torch.autograd.grad(out.square().sum(), (q, k, v))])


def usage() -> dict[str, float]:
    """Of this process."""
    process = psutil.Process()
    rss = process.memory_info().rss / 2**20
    return {"rss_mib": round(rss, 1), "descriptors": process.num_fds(), "threads": process.num_threads()}


def large_hop(mesh: RingMesh) -> bool:
    """512 MB to the next rank, as K and V of 256 MB each: are all bits those that were sent?"""
    count = LARGE_BYTES // 2 // 8

    def numbers(rank: int, which: int) -> Tensor:
        generator = torch.Generator().manual_seed(2 * rank + which)
        return torch.randint(-(2**62), 2**62, (count,), generator=generator)

    before = (mesh.ring_rank - 1) % mesh.ring_size
    sends = [Message(numbers(mesh.ring_rank, which), mesh.ring_rank + 1) for which in (0, 1)]
    receives = [Message(torch.empty(count, dtype=torch.int64), before) for _ in (0, 1)]
    Exchange(mesh, 600.0).post(sends, receives, 1).wait()
    return all(torch.equal(message.tensor, numbers(before, which)) for which, message in enumerate(receives))


def on_a_rank(options: argparse.Namespace) -> dict[str, Any]:
    """All passes of one rank; rank 0 prints."""
    size = dist.get_world_size()
    mesh = RingMesh.from_world(size)
    first = [one_pass(mesh, options.tokens, number) for number in range(len(PATTERNS))]
    different, seen, started = 0, [], time.monotonic()
    marks = {int(options.passes * share / 10) for share in range(11)} | {int(options.passes * WARM_UP)}
    for number in range(options.passes + 1):
        different += one_pass(mesh, options.tokens, number) != first[number % len(PATTERNS)]
        if number in marks:
            seen.append({"pass": number, **usage()})
            if mesh.ring_rank == 0:
                print_row({"ranks": size, "seconds": round(time.monotonic() - started), **seen[-1]})
    exact = None if options.no_large else large_hop(mesh)
    return {"different": different, "large_hop_exact": exact, "seen": seen}


def judge(result: dict[str, Any], passes: int, slack_mib: float) -> list[str]:
    """What is wrong with a rank."""
    flat = [mark for mark in result["seen"] if mark["pass"] >= passes * WARM_UP]
    wrong = [f"{result['different']} results differ"] if result["different"] else []
    if result["large_hop_exact"] is False:
        wrong.append("the large hop did not arrive bit for bit")
    for name, slack in (("rss_mib", slack_mib), ("descriptors", 0), ("threads", 0)):
        growth = flat[-1][name] - flat[0][name]
        if growth > slack:
            wrong.append(f"{name} grew by {growth:g}")
    return wrong


def main(arguments: list[str] | None = None) -> int:
    """One row per ring size; exit code 1 if anything grew or differed."""
    parser = make_parser(
        __doc__, passes=(10000, "forward + backward"), ranks=[2, 4], tokens=512,
        no_large=(False, "without the hop of 512 MB"), slack_mib=(8.0, "of growth that counts as none"),
    )  # fmt: skip
    options = parser.parse_args(arguments)
    bad = False
    for size in options.ranks:
        ranks = run_ranks(on_a_rank, size, (options,), threads=1, deadline_s=86_400)
        wrong = [judge(result, options.passes, options.slack_mib) for result in ranks]
        bad |= any(wrong)
        last = [result["seen"][-1] for result in ranks]
        exact = all(result["large_hop_exact"] is not False for result in ranks)
        row = {"ranks": size, "passes": options.passes, "wrong": wrong, "last": last}
        print_row(row | {"large_exact": exact})
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
