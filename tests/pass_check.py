"""Check a pass with what is installed, torch, numpy and pydantic at least; prints one line of JSON.

    python tests/pass_check.py                   # elsewhere than in a checkout: the installed package
    python tests/pass_check.py pass simulator    # some of the parts

Two ranks over gloo run attention forward and backward in float64, by patterns with grouped heads, and compare
with the definition to 1e-12; the same is compiled, and simulated. Imports nothing of the tests.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
from typing import Any

import numpy
import torch
import torch.distributed as dist

import ds_ring

TOKENS, RANKS, QUERY_HEADS, KV_HEADS, HEAD_DIM = 96, 2, 4, 2, 16
MOST = 1e-12
# Packages that a pass does without, also where they are installed.
OPTIONAL = ("deepspeed", "transformers", "psutil", "filelock", "rich", "tqdm", "yaml", "shtab")


def within_block(batch: Any, head: Any, query: Any, key: Any) -> Any:
    """A mask function of FlexAttention's kind: by pairs of positions."""
    return (query // 24 == key // 24) | (key < 5)


def patterns() -> dict[str, tuple[Any, torch.Tensor]]:
    """Return patterns and their masks by the definition."""
    at = torch.arange(TOKENS)
    query, key = at[:, None], at[None, :]
    documents = at // 37
    causal, same = query >= key, documents[:, None] == documents[None, :]
    return {
        "causal": (ds_ring.Causal(), causal),
        "window": (ds_ring.SlidingWindow(20), causal & (query - key < 20)),
        "documents": (ds_ring.Causal() & ds_ring.Documents(document_ids=documents), causal & same),
        "mask_mod": (ds_ring.MaskMod(within_block), within_block(None, None, query, key)),
    }


def by_definition(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Attention without any kernel."""
    k, v = (x.repeat_interleave(QUERY_HEADS // KV_HEADS, dim=1) for x in (k, v))
    scores = (q @ k.mT / HEAD_DIM**0.5).masked_fill(~mask, float("-inf"))
    return scores.softmax(-1) @ v


def make_tensors() -> list[torch.Tensor]:
    """Return q, k, v and the gradient of the result, equal on all ranks."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, heads, TOKENS, HEAD_DIM) for heads in (QUERY_HEADS, KV_HEADS, KV_HEADS, QUERY_HEADS)]
    return [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]


def run_rank(rank: int, store: str, compiled: bool) -> dict[str, float]:
    """Return the largest error of each pattern on this rank; without a store, of torchrun's."""
    where = f"file://{store}" if store else "env://"
    dist.init_process_group("gloo", where, rank=rank, world_size=RANKS)
    mesh = ds_ring.RingMesh.from_world(ring_size=RANKS, ulysses_size=1)
    errors = {}
    for name, (pattern, mask) in patterns().items():
        layout = ds_ring.make_layout("zigzag", tokens=TOKENS, ring_size=RANKS, pattern=pattern)

        def attend(q: Any, k: Any, v: Any, pattern: Any = pattern, layout: Any = layout) -> Any:
            return ds_ring.ring_attention(2 * q, k, v, pattern=pattern, layout=layout, mesh=mesh, scale=0.125)

        call = torch.compile(attend, backend="aot_eager", fullgraph=True) if compiled else attend
        whole = [x.requires_grad_() for x in make_tensors()[:3]]
        grad = make_tensors()[3]
        expected = by_definition(*whole, mask)
        expected_grads = torch.autograd.grad(expected, whole, grad)
        shards = [ds_ring.shard_sequence(x, layout, ring_rank=rank, dim=2) for x in (*whole, grad)]
        leaves = [x.detach().requires_grad_() for x in shards[:3]]
        out = call(*leaves)
        grads = torch.autograd.grad(out, leaves, shards[3])
        parts = zip((out, *grads), (expected, *expected_grads), strict=True)
        errors[name] = max(
            float((part - ds_ring.shard_sequence(value, layout, ring_rank=rank, dim=2)).detach().abs().max())
            for part, value in parts
        )
    mesh.close()
    dist.destroy_process_group()
    return errors


def run_ranks(compiled: bool) -> dict[str, float]:
    """Return the largest error of each pattern on all ranks, which are processes."""
    with tempfile.TemporaryDirectory() as folder, multiprocessing.get_context("spawn").Pool(RANKS) as pool:
        store = os.path.join(folder, "store")
        results = pool.starmap(run_rank, [(rank, store, compiled) for rank in range(RANKS)], chunksize=1)
        return {name: max(result[name] for result in results) for name in results[0]}


def run_simulator() -> dict[str, float]:
    """Return the largest error of each pattern with virtual ranks."""
    errors = {}
    q, k, v, _ = make_tensors()
    for name, (pattern, mask) in patterns().items():
        layout = ds_ring.make_layout("zigzag", tokens=TOKENS, ring_size=4, pattern=pattern)
        out = ds_ring.simulate(q, k, v, pattern=pattern, layout=layout).out
        errors[name] = float((out - by_definition(q, k, v, mask)).abs().max())
    return errors


def main() -> int:
    """Run all, print a line, and return 1 where something is not exact."""
    parts: dict[str, Any] = {
        "pass": lambda: run_ranks(False),
        "compiled": lambda: run_ranks(True),
        "simulator": run_simulator,
    }
    results = {name: parts[name]() for name in sys.argv[1:] or parts}
    exact = {name: max(errors.values()) <= MOST for name, errors in results.items()}  # NaN is not
    about = {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "ds_ring": os.path.dirname(ds_ring.__file__),
        "imported": sorted(set(OPTIONAL) & set(sys.modules)),
    }
    print(json.dumps(about | {"exact": exact, "errors": results}))
    return 0 if all(exact.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
