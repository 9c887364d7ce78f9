"""Run ring-flash-attn's own tests against `ds_ring.contrib.ring_flash_attn`, on CPU ranks.

    pip download ring_flash_attn==0.1.8 --no-deps --no-binary :all: && tar xf ring_flash_attn-0.1.8.tar.gz
    python tools/ring_flash_attn_tests.py ring_flash_attn-0.1.8/test --ranks 4

Their scripts print the largest difference from flash-attn on one GPU, in bfloat16; most assert nothing. Here
each runs as it is but for the words "nccl" and "cuda" and the package that it imports. flash-attn's functions
are computed densely in float32, and `utils`, which the package lacks, is ours. A script passes if every
difference is at most `--bound` of the largest value on any rank.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CHANGES = (('"nccl"', '"gloo"'), ('f"cuda:{rank}"', '"cpu"'), ('"cuda"', '"cpu"'))
SECONDS = 300.0


def attend(qkv: Tensor, ends: list[int], causal: bool) -> tuple[Tensor, Tensor]:
    """Attend densely to packed documents: qkv [T, 3, H, D]; returns out [T, H, D] and lse [H, T]."""
    q, k, v = (x.transpose(0, 1).float() for x in qkv.unbind(1))
    outs, lses = [], []
    for begin, end in itertools.pairwise(ends):
        scores = q[:, begin:end] @ k[:, begin:end].mT / q.shape[-1] ** 0.5
        if causal:
            scores = scores.masked_fill(torch.ones_like(scores[0]).triu(1).bool(), float("-inf"))
        outs.append(scores.softmax(-1) @ v[:, begin:end])
        lses.append(scores.logsumexp(-1))
    return torch.cat(outs, 1).transpose(0, 1).to(qkv.dtype), torch.cat(lses, 1)


def flash_attn() -> ModuleType:
    """Return a stand-in for flash-attn with the two functions that the tests compare with."""
    module = ModuleType("flash_attn")

    def fixed(qkv: Tensor, causal: bool, **_: Any) -> tuple[Tensor, Tensor, None]:
        rows = [attend(one, [0, len(one)], causal) for one in qkv]
        return torch.stack([out for out, _ in rows]), torch.stack([lse for _, lse in rows]), None

    def varlen(
        qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, causal: bool, **_: Any
    ) -> tuple[Tensor, Tensor, None]:
        return *attend(qkv, cu_seqlens.tolist(), causal), None

    vars(module).update(flash_attn_qkvpacked_func=fixed, flash_attn_varlen_qkvpacked_func=varlen)
    return module


def utils() -> ModuleType:
    """Return the helpers that the tests import: `log` prints the largest value, on each rank in turn."""
    module = ModuleType("utils")

    def log(name: str, values: Tensor, rank0_only: bool = False) -> None:
        text = f"max {values.abs().max().item():.3g}"
        for rank in range(1 if rank0_only else dist.get_world_size()):
            if rank == dist.get_rank():
                print(f"{name}: {text}" if rank0_only else f"{name}:\n[{rank}] {text}", flush=True)
            if not rank0_only:
                dist.barrier()

    vars(module).update(log=log, set_seed=lambda rank, seed=42: torch.manual_seed(rank + seed))
    return module


def run_one(script: Path) -> None:
    """Run a test in this process, which is one of the ranks."""
    from ds_ring.contrib import ring_flash_attn

    torch.set_num_threads(1)
    sys.modules["flash_attn"], sys.modules["utils"] = flash_attn(), utils()
    ring_flash_attn.install()
    source = script.read_text()
    for theirs, ours in CHANGES:
        source = source.replace(theirs, ours)
    exec(compile(source, str(script), "exec"), {"__name__": "__main__"})


def differences(printed: str) -> dict[str, float]:
    """Return the largest difference of each name over all ranks, relative to the largest value before it."""
    largest: dict[str, float] = {}  # of each name, in the order of printing
    name = ""
    for line in printed.splitlines():
        if head := re.match(r"([^\[].*?):", line):
            name = head[1]
        if value := re.search(r"max ([\d.e+-]+|nan)", line):
            number = float(value[1])
            largest[name] = max(largest.get(name, 0.0), number if number == number else float("inf"))
    found, of = {}, 1.0
    for name, number in largest.items():
        if "diff" in name:
            found[name] = number / of
        else:
            of = number
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="the folder `test` of ring-flash-attn, or one script")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--bound", type=float, default=0.02, help="of a relative difference in bfloat16")
    parser.add_argument("--as-rank", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.as_rank:
        run_one(asked.folder)
        return 0
    scripts = [asked.folder] if asked.folder.is_file() else sorted(asked.folder.glob("test_*.py"))
    if not scripts:
        parser.error(f"expected scripts test_*.py in {asked.folder}, got none")
    failed = 0
    for script in scripts:
        if "triton" in script.name:
            print(f"not run {script.name}: it tests kernels of that package", flush=True)
            continue
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(asked.ranks)]
            command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--log-dir", folder]
            command += [__file__, str(script), "--as-rank"]
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=environment)
        found = differences(done.stdout)
        # A script that compares nothing asserts by itself.
        bad = done.returncode or max(found.values(), default=0.0) > asked.bound
        bad = bad or not (found or "assert" in script.read_text())
        failed += bool(bad)
        shown = ", ".join(f"{name} {error:.1e}" for name, error in found.items())
        print(f"{'FAILED' if bad else 'passed'}  {script.name}: {shown or done.stderr[-2000:]}", flush=True)
    print(f"{len(scripts)} scripts on {asked.ranks} ranks: {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
