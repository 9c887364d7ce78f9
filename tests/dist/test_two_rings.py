"""Two rings in one process, a thread each: every result is that of one thread, to the last bit.

The threads share the process: the tables of contexts, the caches of plans and layouts, torch's own state. The
interpreter is told to switch threads a thousand times as often as usual, and the caches are emptied before
each round, so that both threads fill them at once. Meshes are made before, in the same order on all ranks, with
a long heartbeat timeout: at that switching, a thread of Python may starve for seconds on a busy machine.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from ds_ring import Causal, Dilated, Documents, Full, RingMesh, SlidingWindow, make_layout, shard_sequence
from ds_ring.masks.pattern import Pattern
from ds_ring.ops.context import ContextCache
from tests.calls import attend
from tests.cases import Shape, document_ids, tensors


class Job(NamedTuple):
    """One pass, forward and backward."""

    pattern: Pattern
    layout: str
    shape: Shape
    transport: str = "ring"


def jobs(small: int, large: int) -> list[Job]:
    """Passes of many kinds; both rings make all of them, at other lengths and partly in common."""
    both = Shape(batch=1, query_heads=4, kv_heads=4, tokens=96, head_dim=8)
    local = [replace(both, tokens=tokens) for tokens in (small, large)]
    return [
        Job(Causal(), "zigzag", both),
        Job(Full(), "contiguous", local[0]),
        Job(SlidingWindow(11), "contiguous", local[1]),
        Job(Dilated((16, 32, 64), (1, 2, 4)), "auto", both),
        Job(Documents(document_ids(96, mean=12)) & Causal(), "striped", both),
        Job(Causal(), "zigzag", local[1], "all_gather"),
        Job(Causal(), "balanced", local[0]),
    ]


def passes(mesh: RingMesh, todo: list[Job], seed: int) -> list[list[Tensor]]:
    """Local out, dq, dk and dv of every job."""
    results = []
    for number, job in enumerate(todo):
        layout = make_layout(
            job.layout,
            tokens=job.shape.tokens,
            ring_size=mesh.ring_size,
            pattern=job.pattern,
            multiple_of=mesh.ulysses_size,
        )
        whole = tensors(job.shape, seed=seed + number)
        q, k, v, grad = (shard_sequence(x, layout, mesh=mesh, dim=2) for x in whole)
        locals_ = [x.requires_grad_() for x in (q, k, v)]
        out = attend(*locals_, pattern=job.pattern, layout=layout, mesh=mesh, transport=job.transport)
        out.backward(grad)
        results.append([out.detach(), *(x.grad for x in locals_)])
    return results


def at_once(*acts: Callable[[], Any]) -> list[Any]:
    """The results of some functions, each run by a thread of its own, all started together."""
    results: list[Any] = [None] * len(acts)
    errors: list[BaseException] = []
    start = threading.Barrier(len(acts))

    def run(place: int) -> None:
        start.wait()
        try:
            results[place] = acts[place]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(acts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def empty_caches() -> None:
    """All of ds_ring's lru_caches."""
    for module in [m for name, m in sys.modules.items() if name.startswith("ds_ring.") and m is not None]:
        for value in list(vars(module).values()):
            if hasattr(value, "cache_clear") and getattr(value, "__module__", "").startswith("ds_ring."):
                value.cache_clear()


def differing(got: list[list[Tensor]], want: list[list[Tensor]]) -> list[str]:
    names = ("out", "dq", "dk", "dv")
    return [
        f"job {number}: {name}"
        for number, (mine, alone) in enumerate(zip(got, want, strict=True))
        for name, x, y in zip(names, mine, alone, strict=True)
        if not torch.equal(x, y)
    ]


def two_rings(rank: int, world_size: int, second: tuple[int, int], rounds: int) -> list[str]:
    """What differed in any round; the second ring has another grid where `second` says so."""
    rings = [RingMesh.from_world(*grid, heartbeat_timeout_s=60) for grid in ((world_size,), second)]
    todo = [jobs(64, 83), jobs(72, 128)]
    alone = [passes(mesh, mine, seed) for seed, (mesh, mine) in enumerate(zip(rings, todo, strict=True))]
    before = sys.getswitchinterval()
    sys.setswitchinterval(before / 1000)
    different = []
    try:
        for number in range(rounds):
            if number % 2 == 0:
                empty_caches()
                for mesh in rings:
                    mesh.owners[ContextCache].by_key.clear()
                gc.collect()
            together = at_once(*(lambda i=i: passes(rings[i], todo[i], i) for i in range(2)))
            for ring, (got, want) in enumerate(zip(together, alone, strict=True)):
                different += [f"round {number}, ring {ring}, {what}" for what in differing(got, want)]
    finally:
        sys.setswitchinterval(before)
    return different


@pytest.mark.night
@pytest.mark.parametrize(
    ("world", "second"), [(2, (2, 1)), (2, (1, 2)), (4, (4, 1)), (4, (2, 2)), (4, (2, 1))]
)
def test_two_rings_at_once_are_exact(rank_pool, world, second):
    """The second is the same ring again, one with Ulysses, or two rings of data replicas."""
    # Every second round finds full caches.
    assert rank_pool(world).run(two_rings, second, 4, timeout_s=150) == [[]] * world
