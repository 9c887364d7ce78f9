"""Measure the host's processor time of a hop: what the host does for a hop beside the attention operator.

    OMP_NUM_THREADS=1 python -m tools.bench_host

One rank of a ring whose other ranks are not there (torch's "fake" process group: sends and receives return at
once). The tensors are small and on the CPU, the kernel is `flash` as it runs on CUDA, but its operators
return tensors made before: what is left is the pass, the messages, the additions' operators and the thread
that watches works. On CUDA these operators are launches, which take as long as a small operator of the CPU
does. The merge is one launch on CUDA: a small operator stands for it, and a second line has the eager one.
Works behave as NCCL's: one for a batch, and a wait returns at once. The line of `flex` has its tables, its
marks and Dynamo's guards, with compiled functions that return tensors made before.

Left out, since they need a device: what a Triton launch takes beyond a small operator (some 30 us in its
Python part, one a merge and one to three a hop of `flex`), the wrapper that Inductor writes around them, and
NCCL's posts.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from ds_ring import Causal
from ds_ring.comm.exchange import Exchange, Route
from ds_ring.comm.messages import Message
from ds_ring.comm.streams import Streams
from ds_ring.comm.waiting import Pending
from ds_ring.kernels.flash.executors import Flash, Operators
from ds_ring.kernels.flash.kernel import FlashKernel
from ds_ring.kernels.flex import FlexKernel
from ds_ring.kernels.interface import Kernel
from ds_ring.masks.pattern import Pattern
from ds_ring.ring.ring_pass import RingPass
from ds_ring.schedule.layout import make_layout
from ds_ring.schedule.plan import build_plan
from tests.host_waits import fake_ring

GOALS_US = {"forward": 80.0, "backward": 150.0}  # of a hop, processor time
CAUSAL = Causal()
HEADS, KV_HEADS, HEAD_DIM = 2, 1, 8


class NoOperators:
    """Return tensors of the shapes that FlashAttention's operators return, each made once."""

    def __init__(self) -> None:
        self._made: dict[tuple[torch.Size, ...], tuple[Tensor, ...]] = {}

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *_: object, **__: object) -> tuple[Tensor, ...]:
        if (q.shape,) not in self._made:
            batch, tokens, heads, _width = q.shape
            lse = torch.zeros(batch, heads, tokens)
            self._made[q.shape,] = torch.ones(q.shape, dtype=q.dtype), lse
        return self._made[q.shape,]

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: object, **__: object
    ) -> tuple[Tensor, ...]:
        key = (q.shape, k.shape)
        if key not in self._made:
            self._made[key] = tuple(torch.ones(x.shape, dtype=x.dtype) for x in (q, k, v))
        return self._made[key]


def one_launch(out: Tensor, *_: object) -> None:
    """Stand for a merge or a sum of parts: one launch on CUDA, up to some twenty operators here."""
    out.zero_()


class DeviceExchange(Exchange):
    """Wait for works as on a GPU: by the stream, and a thread watches over them."""

    def route(self, *sides: Sequence[Message]) -> Route:
        route = super().route(*sides)
        # NCCL's way: one Work for all messages of a batch
        return route._replace(peers=route.all_peers)

    def start(self, *given: Any) -> Pending:
        pending = super().start(*given)
        del pending.works[1:]
        return pending

    def _streams_that_wait(self, tensor: Tensor, group: object) -> Streams:
        return self.streams(tensor)


def flash_without_operators() -> FlashKernel:
    """Return the kernel as on CUDA, with operators that compute nothing."""
    kernel, stand_in = FlashKernel(), NoOperators()
    operators = Operators(flash_forward=stand_in.forward, flash_backward=stand_in.backward)
    kernel._on_cpu = (Flash(operators),)
    return kernel


@torch._dynamo.register_backend
def made_before(module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """Compile a graph, for torch.compile, to a function that computes once for each set of shapes."""
    made: dict[tuple[Any, ...], Any] = {}

    def call(*given: Any) -> Any:
        key = tuple(x.shape if isinstance(x, Tensor) else x for x in given)
        if key not in made:
            made[key] = module(*given)
        return made[key]

    return call


def seconds_of(work: Callable[[], object], rounds: int) -> tuple[float, float]:
    """Return the median processor seconds of the calling thread, and of the process."""
    of_thread, of_process = [], []
    for _ in range(rounds):
        before = time.thread_time(), time.process_time()
        work()
        of_thread.append(time.thread_time() - before[0])
        of_process.append(time.process_time() - before[1])
    return statistics.median(of_thread), statistics.median(of_process)


def operator_us(rounds: int) -> float:
    """Return the processor microseconds of one small operator: what a busy machine makes longer as well."""
    x, y = torch.ones(8, 8), torch.ones(8, 8)
    found = []
    for _ in range(rounds):
        before = time.thread_time()
        for _ in range(20):
            x.add_(y)
        found.append((time.thread_time() - before) / 20)
    return 1e6 * statistics.median(found)


@dataclass(frozen=True)
class Hops:
    """Hold one rank of a ring whose other ranks are not there, and its two passes."""

    made: RingPass  # the pass
    ring_size: int  # hops of a pass
    operands: tuple[Tensor, Tensor, Tensor, Tensor]  # q, k, v, grad_out
    results: tuple[Tensor, Tensor]  # out, lse

    def forward(self) -> object:
        q, k, v, _ = self.operands
        return self.made.forward(q, k, v)

    def backward(self) -> object:
        q, k, v, grad_out = self.operands
        return self.made.backward(grad_out, q, k, v, *self.results)


@contextmanager
def hops_of(
    pattern: Pattern = CAUSAL, layout_name: str = "zigzag", ring_size: int = 8, slots: int = 16,
    whole_merge: bool = False, kernel: Kernel | None = None,
) -> Iterator[Hops]:  # fmt: skip
    """Make the passes of the rank in the middle of a ring."""
    rank = ring_size // 2 - 1
    with ExitStack() as stack:
        mesh = stack.enter_context(fake_ring(rank, ring_size))
        stack.enter_context(mock.patch("ds_ring.kernels.flash.kernel._usable", lambda x, width: x))
        # as on CUDA: K and V of one head are one message there
        stack.enter_context(mock.patch("ds_ring.ring.buffers.keys_apart", return_value=False))
        if not whole_merge:
            for name in ("merge_", "merge_parts_", "add_parts_"):
                stack.enter_context(mock.patch(f"ds_ring.ring.accumulator.{name}", one_launch))
        layout = make_layout(layout_name, tokens=slots * ring_size, ring_size=ring_size, pattern=pattern)
        plan = build_plan(pattern, layout, query_heads=HEADS, kv_heads=KV_HEADS)
        kernel, exchange = kernel or flash_without_operators(), DeviceExchange(mesh)
        made = RingPass(plan.rank(rank), kernel, exchange, 0.25, buffers=mesh.buffers)
        shapes = [(1, heads, slots, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
        q, k, v, grad_out = (torch.ones(shape, dtype=torch.bfloat16) for shape in shapes)
        yield Hops(made, ring_size, (q, k, v, grad_out), made.forward(q, k, v))


def measure(
    pattern: Pattern, layout_name: str, arguments: argparse.Namespace, whole_merge: bool = False,
    flex: bool = False,
) -> bool:  # fmt: skip
    """Print the times of a pattern; return whether they are within the goal."""
    ring_size, rounds, within = arguments.ring_size, arguments.rounds, True
    kernel = FlexKernel(arguments.slots, "made_before") if flex else flash_without_operators()
    with hops_of(pattern, layout_name, ring_size, arguments.slots, whole_merge, kernel) as hops:
        for name, goal in GOALS_US.items():
            work = getattr(hops, name)
            seconds_of(work, 5)
            before = operator_us(rounds)
            of_thread, of_process = (1e6 * s / ring_size for s in seconds_of(work, rounds))
            operator = (before + operator_us(rounds)) / 2
            within &= of_process <= goal
            print(
                f"{kernel.name} {pattern!s} {layout_name} ring {ring_size},"
                f" {'eager' if whole_merge else 'one'} merge {name:8}: {of_thread:5.1f} us a hop,"
                f" {of_process:5.1f} with the watching thread ({'no goal' if flex else f'goal {goal:.0f}'});"
                f" one small operator {operator:4.2f} us"
            )
            if arguments.profile == name and not whole_merge:
                with cProfile.Profile() as found:
                    for _ in range(rounds):
                        work()
                pstats.Stats(found).sort_stats("tottime").print_stats(40)
    return within


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--ring-size", type=int, default=8)
    parser.add_argument("--slots", type=int, default=16, help="tokens of a shard (default 16)")
    parser.add_argument("--profile", choices=("forward", "backward"), help="print where the time goes")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    within = measure(CAUSAL, "zigzag", arguments)
    measure(CAUSAL, "zigzag", arguments, whole_merge=True)
    measure(CAUSAL, "zigzag", arguments, flex=True)
    raise SystemExit(0 if within else 1)


if __name__ == "__main__":
    main()
