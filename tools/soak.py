"""Thousands of passes: memory, descriptors and threads stay flat, the last result has the first one's bits.

Then one hop of 512 MB, which must arrive bit for bit. Real gloo ranks.

Example:
    python tools/soak.py --passes 10000 --ranks 2 4
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from ds_ring import Causal, Dilated, RingMesh, make_layout, ring_attention
from ds_ring.runtime.exchange import Exchange
from ds_ring.runtime.messages import Message

PATTERNS = (Causal(), Dilated((64, 256), (1, 2)))
WARM_UP = 0.1  # of the passes, before anything is called flat
LARGE_BYTES = 512 << 20


def digest_of(tensors: list[Tensor]) -> str:
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
    return digest_of([out, *torch.autograd.grad(out.square().sum(), (q, k, v))])


def usage() -> dict[str, float]:
    """Of this process."""
    process = psutil.Process()
    rss = process.memory_info().rss / 2**20
    return {"rss_mib": round(rss, 1), "descriptors": process.num_fds(), "threads": process.num_threads()}


def large_hop(mesh: RingMesh) -> bool:
    """512 MB to the next rank, as K and V of 256 MB each: are all bits those that were sent?"""
    count = LARGE_BYTES // 2 // 8

    def of(rank: int, which: int) -> Tensor:
        generator = torch.Generator().manual_seed(2 * rank + which)
        return torch.randint(-(2**62), 2**62, (count,), generator=generator)

    before = (mesh.ring_rank - 1) % mesh.ring_size
    sends = [Message(of(mesh.ring_rank, which), mesh.ring_rank + 1) for which in (0, 1)]
    receives = [Message(torch.empty(count, dtype=torch.int64), before) for _ in (0, 1)]
    Exchange(mesh, 600.0).post(sends, receives, 1).wait()
    return all(torch.equal(message.tensor, of(before, which)) for which, message in enumerate(receives))


def rank_main(rank: int, size: int, store: str, options: argparse.Namespace, out: str) -> None:
    """All passes of one rank; rank 0 prints."""
    torch.set_num_threads(1)
    timeout = timedelta(minutes=10)
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=size, timeout=timeout)
    mesh = RingMesh.from_world(size)
    first = [one_pass(mesh, options.tokens, number) for number in range(len(PATTERNS))]
    different, seen, started = 0, [], time.monotonic()
    marks = {int(options.passes * share / 10) for share in range(11)} | {int(options.passes * WARM_UP)}
    for number in range(options.passes + 1):
        different += one_pass(mesh, options.tokens, number) != first[number % len(PATTERNS)]
        if number in marks:
            seen.append({"pass": number, **usage()})
            if rank == 0:
                print(json.dumps({"ranks": size, "seconds": round(time.monotonic() - started), **seen[-1]}))
    exact = large_hop(mesh) if options.large else None
    found: dict[str, Any] = {"different": different, "large_hop_exact": exact, "seen": seen}
    Path(f"{out}.{rank}").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def judge(found: dict[str, Any], passes: int, slack_mib: float) -> list[str]:
    """What is wrong with a rank."""
    flat = [mark for mark in found["seen"] if mark["pass"] >= passes * WARM_UP]
    wrong = [f"{found['different']} results differ"] if found["different"] else []
    if found["large_hop_exact"] is False:
        wrong.append("the large hop did not arrive bit for bit")
    for name, slack in (("rss_mib", slack_mib), ("descriptors", 0), ("threads", 0)):
        growth = flat[-1][name] - flat[0][name]
        if growth > slack:
            wrong.append(f"{name} grew by {growth:g}")
    return wrong


def main(arguments: list[str] | None = None) -> int:
    """One row per ring size; exit code 1 if anything grew or differed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--passes", type=int, default=10000, help="forward + backward")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--no-large", dest="large", action="store_false", help="without the hop of 512 MB")
    parser.add_argument("--slack-mib", type=float, default=8.0, help="of growth that counts as none")
    options = parser.parse_args(arguments)
    bad = False
    for size in options.ranks:
        with tempfile.TemporaryDirectory() as folder:
            spawn(rank_main, (size, f"{folder}/store", options, f"{folder}/out"), nprocs=size)
            ranks = [json.loads(Path(f"{folder}/out.{rank}").read_text()) for rank in range(size)]
        wrong = [judge(found, options.passes, options.slack_mib) for found in ranks]
        bad |= any(wrong)
        last = [found["seen"][-1] for found in ranks]
        exact = all(found["large_hop_exact"] is not False for found in ranks)
        row = {"ranks": size, "passes": options.passes, "wrong": wrong, "last": last, "large_exact": exact}
        print(json.dumps(row), flush=True)
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
