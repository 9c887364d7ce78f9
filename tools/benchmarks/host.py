"""Measure the host's processor time of a hop, without the attention operator.

One rank of a ring whose other ranks are missing (torch's "fake" process group: sends and receives return at
once). The tensors are small and on the CPU, the kernel is `flash` as it runs on CUDA, but its operators
return tensors made before: the rest is the pass, the messages, the operators of additions and the thread that
watches works. On CUDA these operators are launches, which take as long as a small operator of the CPU does.
The merge is one launch on CUDA: a small operator replaces it, and a second row has the eager one. Works
behave as NCCL's: one for a batch, and a wait returns at once. The row of `flex` has its tables, its marks and
Dynamo's guards, with compiled functions that return tensors made before.

Not included, since they need a device: the rest of a Triton launch (some 30 us in its Python part, one a
merge and one to three a hop of `flex`), the wrapper that Inductor writes around them, and NCCL's posts.

Example:
    OMP_NUM_THREADS=1 python tools/bench.py host
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import time
from collections.abc import Callable, Iterator

import torch

from benchmarks.hop_stand_ins import CAUSAL, flash_without_operators, prepare_hops
from benchmarks.measuring import ResultRow
from ds_ring.kernels.flex.kernel import FlexKernel

GOALS_US = {"forward": 80.0, "backward": 150.0}  # of a hop, processor time
OPTIONS = {
    "rounds": 300, "ring_size": 8, "slots": (16, "tokens of a shard"),
    "profile": ("", "print where the time goes", ["", "forward", "backward"]),
}  # fmt: skip


def processor_seconds(work: Callable[[], object], rounds: int) -> tuple[float, float]:
    """Return the median processor seconds of the calling thread, and of the process."""
    of_thread, of_process = [], []
    for _ in range(rounds):
        before = time.thread_time(), time.process_time()
        work()
        of_thread.append(time.thread_time() - before[0])
        of_process.append(time.process_time() - before[1])
    return statistics.median(of_thread), statistics.median(of_process)


def operator_us(rounds: int) -> float:
    """Return the processor microseconds of one small operator, which a busy machine makes longer as well."""
    x, y = torch.ones(8, 8), torch.ones(8, 8)

    def twenty() -> None:
        for _ in range(20):
            x.add_(y)

    return 1e6 * processor_seconds(twenty, rounds)[0] / 20


def print_profile(work: Callable[[], object], rounds: int) -> None:
    """Print the functions in which a pass spends most of its time."""
    with cProfile.Profile() as profiler:
        for _ in range(rounds):
            work()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(40)


def measure_rows(
    options: argparse.Namespace, kernel_name: str = "flash", merge: str = "one"
) -> Iterator[ResultRow]:
    """Yield a row for the forward and one for the backward pass; a hop above its goal is wrong."""
    ring_size, rounds = options.ring_size, options.rounds
    flex = FlexKernel(options.slots, "made_before") if kernel_name == "flex" else None
    kernel = flex or flash_without_operators()
    with prepare_hops(CAUSAL, "zigzag", ring_size, options.slots, merge == "eager", kernel) as hops:
        for name, goal in GOALS_US.items():
            work = getattr(hops, name)
            processor_seconds(work, options.warm_up)
            before = operator_us(rounds)
            of_thread, of_process = (1e6 * s / ring_size for s in processor_seconds(work, rounds))
            operator = (before + operator_us(rounds)) / 2
            results = {"hop_us": round(of_thread, 1), "with_watching_thread_us": round(of_process, 1)}
            results["small_operator_us"] = round(operator, 2)
            late = of_process > goal and flex is None
            wrong = f"{name}: expected at most {goal:g} us, got {of_process:.1f} us" if late else ""
            case = {"kernel": kernel_name, "merge": merge, "pass": name, "ring_size": ring_size}
            yield ResultRow(case, results if flex else results | {"goal_us": goal}, wrong)
            if options.profile == name and merge == "one" and flex is None:
                print_profile(work, rounds)


def run(options: argparse.Namespace) -> Iterator[ResultRow]:
    """Yield rows of `flash` with a merge of one launch, with an eager merge (no goal), and of `flex`."""
    yield from measure_rows(options)
    yield from (row._replace(wrong="") for row in measure_rows(options, merge="eager"))
    yield from measure_rows(options, "flex")
