"""One of two ranks on two hosts: passes over the ring, and what became of them, as a JSON file.

python -m tests.dist.namespace_rank OUT.json PASSES TOKENS HEARTBEAT_S HOP_S
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from ds_ring import PassOptions, RingError, RingMesh, SlidingWindow, ring_attention


def main(out: str, passes: int, tokens: int, heartbeat_s: float, hop_s: float) -> None:
    """All keys travel (prune=False), though little of them is attended: the cable is what is slow."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = RingMesh.from_world(2, heartbeat_timeout_s=heartbeat_s)
    torch.manual_seed(rank)
    q, k, v = (torch.randn(1, 1, tokens, 64, requires_grad=True) for _ in range(3))
    digest, seconds = hashlib.sha256(), []
    try:
        for number in range(passes):
            Path(f"{out}.pass").write_text(f"{number} {time.time()}")
            started = time.perf_counter()
            result = ring_attention(
                q,
                k,
                v,
                pattern=SlidingWindow(16),
                layout="contiguous",
                mesh=mesh,
                options=PassOptions(prune=False, hop_timeout_seconds=hop_s),
            )
            grads = torch.autograd.grad(result.sum(), (q, k, v))
            seconds.append(time.perf_counter() - started)
            for tensor in (result, *grads):
                digest.update(tensor.detach().numpy().tobytes())
    except RingError as error:
        outcome = {"error": type(error).__name__, "text": str(error), "peer": getattr(error, "peer", None)}
        Path(out).write_text(json.dumps(outcome | {"at": time.time()}))
        raise
    Path(out).write_text(json.dumps({"digest": digest.hexdigest(), "seconds": seconds, "pid": os.getpid()}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), float(sys.argv[5]))
