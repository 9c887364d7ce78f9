"""What "long_sequence" saves and costs: peak memory by size of tensor, seconds of a step, on real gloo ranks.

A Llama with tied embeddings (5 layers of 384, vocabulary 32,000: 20 million parameters) makes DeepSpeed steps
with a sliding window. The peak is the running sum of the profiler's allocation events; what is alive at that
moment is listed by the size of its tensors, and the largest tensor that ever existed is compared with tokens
x vocabulary and tokens x intermediate. The plan's peak stands beside it, with its components. A tensor that
tiles rule out, or a plan that is off by more than 5 %, makes the exit code 1.

Example:
    python tools/bench_long.py --tokens 131072               # what fits here: every set with tiled_loss
    python tools/bench_long.py --tokens 16384 --options off tiled_loss tiled_mlp "tiled_loss tiled_mlp"
    python tools/bench_long.py --time --tokens 16384 --options off all --rounds 7      # a quiet machine
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections import Counter
from functools import partial
from typing import Any, NamedTuple

import torch
from bench import engine_of, in_turns, llama, parser_of, print_row, zero_of
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

from ds_ring import SlidingWindow
from ds_ring.config.section import tile_tokens
from ds_ring_launcher.plan.estimate import estimate
from ds_ring_launcher.plan.hardware import read_hardware
from ds_ring_launcher.plan.model_file import ModelShape
from ds_ring_launcher.plan.model_memory import FLOAT, MemoryMoment, Zero
from ds_ring_launcher.plan.training_setting import TrainingSetting
from ds_ring_launcher.run.local_ranks import run_ranks
from ds_ring_launcher.tables import console, print_table

MIB = 1 << 20
SHAPE = ModelShape(
    layers=5, hidden=384, heads=6, kv_heads=3, head_dim=64, intermediate=1024, vocab=32_000, tied=True
)
SETS = ["tiled_loss", "tiled_loss tiled_mlp", "tiled_loss offload_checkpoints", "all"]
PLANNED_WITHIN = 0.05  # of the measured peak
NAMES = ("tiled_loss", "tiled_mlp", "offload_checkpoints", "offload_attention")


class Run(NamedTuple):
    """Describe the steps of one set of options."""

    parts: str
    tokens: int
    ranks: int
    stage: int
    checkpointing: bool
    window: int
    steps: int = 2


class MeasuredPeak(NamedTuple):
    """Hold what a rank measured: bytes, and what was alive at the peak (number of blocks by bytes)."""

    peak: int
    largest: int
    alive: dict[int, int]


def start(run: Run) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return an engine and this rank's part of a batch."""
    model = llama(
        run.tokens, SHAPE.vocab, SHAPE.hidden, SHAPE.intermediate, SHAPE.layers, SHAPE.heads, SHAPE.kv_heads,
        head_dim=SHAPE.head_dim, tie_word_embeddings=True,
    )  # fmt: skip
    if run.checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    zero = zero_of(run.stage, SHAPE.largest_parameter)
    section = {
        "pattern": {"window": run.window},
        "layout": "contiguous",
        "hop_timeout_seconds": 600,
        "heartbeat_timeout_seconds": 60,
        "long_sequence": run.parts,
    }
    if run.parts not in ("off", "auto"):
        section["long_sequence"] = dict.fromkeys(NAMES if run.parts == "all" else run.parts.split(), True)
    engine = engine_of(model, run.ranks, section, zero)
    ids = torch.randint(1, SHAPE.vocab, (1, run.tokens), generator=torch.Generator().manual_seed(1))
    return engine, engine.ring.shard_batch({"input_ids": ids, "labels": ids})


def step(engine: Any, batch: dict[str, torch.Tensor]) -> None:
    """Make one optimizer step."""
    engine.backward(engine(**batch).loss)
    engine.step()


def memory_rank(run: Run) -> MeasuredPeak:
    """Measure one rank: the model from its beginning, and its steps (Adam has states from the first on)."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        engine, batch = start(run)
        for _ in range(run.steps):
            step(engine, batch)
    events = [
        (event.start_ns(), event.nbytes())
        for event in profiler.profiler.kineto_results.events()
        if event.name() == "[memory]"
    ]
    total = peak = 0
    alive, at_peak = Counter[int](), dict[int, int]()
    for _, change in sorted(events, key=lambda event: event[0]):
        total += change
        alive[abs(change)] += 1 if change > 0 else -1
        if total > peak:
            peak, at_peak = total, dict(alive)
    return MeasuredPeak(
        peak, max(change for _, change in events), {size: n for size, n in at_peak.items() if n > 0}
    )


def time_rank(runs: list[Run], rounds: int) -> list[list[float]]:
    """Return the seconds of each run's steps: the runs take turns, after one step to warm up."""

    def timed(engine: Any, batch: dict[str, torch.Tensor]) -> float:
        torch.distributed.barrier()
        begin = time.perf_counter()
        step(engine, batch)
        torch.distributed.barrier()
        return time.perf_counter() - begin

    works = {number: partial(timed, *start(run)) for number, run in enumerate(runs)}
    return list(in_turns(works, rounds).values())


def planned(run: Run) -> MemoryMoment:
    """Return what the plan says of the moment of the most memory."""
    parts = () if run.parts == "off" else NAMES if run.parts in ("all", "auto") else run.parts.split()
    zero = Zero(run.stage, run.ranks, 4, SHAPE.largest_parameter, run.stage == 3, fused_adam=False)
    setting = TrainingSetting(
        run.tokens, run.ranks, 1, SHAPE, SlidingWindow(run.window), "contiguous", zero, "float32",
        read_hardware("cpu"), checkpointing=run.checkpointing or "offload_checkpoints" in parts,
        loss_tokens=tile_tokens(True, SHAPE.vocab) if "tiled_loss" in parts else None,
        mlp_tokens=tile_tokens(True, SHAPE.intermediate) if "tiled_mlp" in parts else None,
        offload_checkpoints="offload_checkpoints" in parts, offload_attention="offload_attention" in parts,
    )  # fmt: skip
    peak = estimate(setting).peak
    if run.steps > 1:
        return peak
    # Adam makes its two moments at the end of the first step.
    states = peak.components["optimizer states"] - 2 * FLOAT * zero.share(SHAPE.parameters)
    return peak._replace(components=peak.components | {"optimizer states": states})


def meaning(size: int, run: Run) -> str:
    """Say what has so many bytes, as far as the sizes of the model tell."""
    local = run.tokens // run.ranks
    of = {
        "tokens x vocabulary": local * SHAPE.vocab,
        "tokens x intermediate": local * SHAPE.intermediate,
        "tokens x hidden": local * SHAPE.hidden,
        "tokens x K/V": local * SHAPE.kv_heads * SHAPE.head_dim,
        "tokens x heads": local * SHAPE.heads,
        "embedding": SHAPE.vocab * SHAPE.hidden,
    }
    return next((name for name, elements in of.items() if 4 * elements == size), "")


def wrong(run: Run, found: MeasuredPeak, plan: MemoryMoment) -> str:
    """Say what contradicts the options: a tensor that tiles rule out, a plan that is off; "" for nothing."""
    rows = run.tokens // run.ranks
    wide = {"tiled_loss": rows * SHAPE.vocab, "tiled_loss tiled_mlp": rows * SHAPE.intermediate}
    parts = set(NAMES if run.parts == "all" else run.parts.split())
    for needed, elements in wide.items():
        # The whole embedding and its gradient are larger than short shards' rows.
        if parts >= set(needed.split()) and found.largest // 4 >= elements > SHAPE.parameters:
            return f"a tensor of {found.largest / MIB:.1f} MiB with {needed}"
    ratio = plan.total / found.peak
    return "" if abs(ratio - 1) <= PLANNED_WITHIN else f"planned {ratio:.3f} of what was measured"


def report(run: Run, found: MeasuredPeak, as_json: bool) -> None:
    """Print the peak of a run and what was alive then."""
    local = run.tokens // run.ranks
    limit = 4 * local * SHAPE.intermediate
    plan = planned(run)
    row = {
        "options": run.parts,
        "tokens": run.tokens,
        "peak_mib": round(found.peak / MIB, 1),
        "planned_mib": round(plan.total / MIB, 1),
        "planned_over_measured": round(plan.total / found.peak, 3),
        "largest_tensor_mib": round(found.largest / MIB, 1),
        "tokens_x_vocabulary_mib": round(4 * local * SHAPE.vocab / MIB, 1),
        "tokens_x_intermediate_mib": round(limit / MIB, 1),
    }
    if as_json:
        print_row(row)
        return
    table = Table(title="  ".join(f"{key} {value}" for key, value in row.items()), title_justify="left")
    for head in ("alive at the peak", "MiB each", "number", "MiB"):
        table.add_column(head, justify="left" if head.startswith("alive") else "right")
    by_bytes = sorted(found.alive.items(), key=lambda item: -item[0] * item[1])
    for size, number in by_bytes[:8]:
        table.add_row(meaning(size, run), f"{size / MIB:.1f}", str(number), f"{size * number / MIB:.1f}")
    rest = sum(size * number for size, number in by_bytes[8:])
    table.add_row("all others", "", "", f"{rest / MIB:.1f}")
    print_table(table)
    parts = ", ".join(f"{name} {size / MIB:.1f}" for name, size in plan.components.items() if size)
    console().print(f"planned, {plan.name}: {parts}", markup=False)


def main(arguments: list[str] | None = None) -> int:
    """Print a table for each set of options, or the seconds of their steps."""
    parser = parser_of(
        __doc__, tokens=131_072, ranks=2, window=512, rounds=5,
        no_checkpointing=(False, "keep all activations of layers"),
        options=(SETS, 'sets of options: "off", "all", names'), time=(False, "time steps instead"),
        steps=(2, "of a run whose memory is measured"), deadline=(3000.0, "seconds for each run"),
        json=(False, "one JSON row per line"),
    )  # fmt: skip
    parser.add_argument("--stage", type=int, default=1, choices=range(4), help="of ZeRO")
    options = parser.parse_args(arguments)
    os.environ["DS_ACCELERATOR"] = "cpu"
    given = (options.tokens, options.ranks, options.stage, not options.no_checkpointing, options.window)
    runs = [Run(parts, *given, options.steps) for parts in options.options]
    errors: list[str] = []
    if not options.time:
        for run in runs:
            ranks = run_ranks(memory_rank, run.ranks, (run,), threads=1, deadline_s=options.deadline)
            found = max(ranks, key=lambda found: found.peak)
            report(run, found, options.json)
            errors.append(wrong(run, found, planned(run)))
        for error in filter(None, errors):
            print(f"WRONG: {error}", file=sys.stderr)
        return int(any(errors))
    work = (time_rank, options.ranks, (runs, options.rounds))
    seconds = run_ranks(*work, threads=1, deadline_s=options.deadline)[0]
    first = statistics.median(seconds[0])
    for run, taken in zip(runs, seconds, strict=True):
        middle = statistics.median(taken)
        row = {"options": run.parts, "tokens": run.tokens, "median_s": round(middle, 3)}
        print_row(row | {"least_s": round(min(taken), 3), "ratio": round(middle / first, 3)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
