"""Measure "long_sequence": peak memory by size of tensor, and seconds of a step, on real gloo ranks.

A Llama with tied embeddings (5 layers of 384, vocabulary 32,000: 20 million parameters) makes DeepSpeed steps
with a sliding window.

`long-memory`: the peak is the running sum of the profiler's allocation events; the tensors that are alive at
that moment are listed by size, and the largest tensor that ever existed is compared with tokens x vocabulary
and tokens x intermediate. The row has the peak of `ds-ring plan` and its components, too. A tensor that tiles
rule out, or a plan that is off by more than 5 %, is wrong.

Example:
    python tools/bench.py long-memory --tokens 131072      # every set with tiled_loss
    python tools/bench.py long-memory --tokens 16384 --options off tiled_loss "tiled_loss tiled_mlp"
    python tools/bench.py long-time --tokens 16384 --options off all --rounds 7      # a quiet machine
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from common import llama, make_engine, make_zero_section
from torch.profiler import ProfilerActivity, profile

from benchmarks.measuring import ResultRow, Turns, clock, measure_on_ranks
from ds_ring import SlidingWindow
from ds_ring.memory.tiles.keys import get_chunk_tokens
from ds_ring_launcher.plan.estimate import estimate
from ds_ring_launcher.plan.hardware import read_hardware
from ds_ring_launcher.plan.model_file import ModelShape
from ds_ring_launcher.plan.model_memory import FLOAT, MemoryMoment, Zero
from ds_ring_launcher.plan.training_setting import TrainingSetting
from ds_ring_launcher.run.local_ranks import run_ranks

MIB = 1 << 20
SHAPE = ModelShape(
    layers=5, hidden=384, heads=6, kv_heads=3, head_dim=64, intermediate=1024, vocab=32_000, tied=True
)
SETS = ["tiled_loss", "tiled_loss tiled_mlp", "tiled_loss offload_checkpoints", "all"]
NAMES = ("tiled_loss", "tiled_mlp", "offload_checkpoints", "offload_attention")
PLANNED_WITHIN = 0.05  # of the measured peak
OPTIONS = {
    "tokens": 131_072, "ranks": 2, "window": 512, "rounds": (5, "of long-time"),
    "steps": (2, "of long-memory"), "stage": (1, "of ZeRO", range(4)),
    "options": (SETS, 'sets of options: "off", "all", names'),
    "no_checkpointing": (False, "keep all activations of layers"),
    "deadline": (3000.0, "seconds for each run"),
}  # fmt: skip


def read_names(options: str) -> tuple[str, ...]:
    """Return the options of a set."""
    return () if options == "off" else NAMES if options in ("all", "auto") else tuple(options.split())


def start(options: str, o: argparse.Namespace) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return an engine with a set of options, and this rank's part of a batch."""
    model = llama(
        o.tokens, SHAPE.vocab, SHAPE.hidden, SHAPE.intermediate, SHAPE.layers, SHAPE.heads, SHAPE.kv_heads,
        head_dim=SHAPE.head_dim, tie_word_embeddings=True,
    )  # fmt: skip
    if not o.no_checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    chosen = options if options in ("off", "auto") else dict.fromkeys(read_names(options), True)
    section = {
        "pattern": {"window": o.window}, "layout": "contiguous", "long_sequence": chosen,
        "hop_timeout_seconds": 600, "heartbeat_timeout_seconds": 60,
    }  # fmt: skip
    engine = make_engine(model, o.ranks, section, make_zero_section(o.stage, SHAPE.largest_parameter))
    ids = torch.randint(1, SHAPE.vocab, (1, o.tokens), generator=torch.Generator().manual_seed(1))
    return engine, engine.ring.shard_batch({"input_ids": ids, "labels": ids})


def step(engine: Any, batch: dict[str, torch.Tensor]) -> dict[str, float]:
    """Make one optimizer step; return its seconds."""
    with clock() as taken:
        engine.backward(engine(**batch).loss)
        engine.step()
        dist.barrier()
    return taken


class MeasuredPeak(NamedTuple):
    """Hold the measurements of a rank: bytes, and the number of live blocks at the peak by their bytes."""

    peak: int
    largest: int
    alive: dict[int, int]


def measure_memory(options: str, o: argparse.Namespace) -> MeasuredPeak:
    """Measure one rank: the model from its beginning, and its steps (Adam has states from the first on)."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        engine, batch = start(options, o)
        for _ in range(o.steps):
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
            peak, at_peak = total, {size: count for size, count in alive.items() if count > 0}
    return MeasuredPeak(peak, max(change for _, change in events), at_peak)


def planned(options: str, o: argparse.Namespace) -> MemoryMoment:
    """Return the planned moment of the most memory."""
    names = read_names(options)
    zero = Zero(o.stage, o.ranks, 4, SHAPE.largest_parameter, o.stage == 3, fused_adam=False)
    setting = TrainingSetting(
        o.tokens, o.ranks, 1, SHAPE, SlidingWindow(o.window), "contiguous", zero, "float32",
        read_hardware("cpu"), checkpointing=not o.no_checkpointing or "offload_checkpoints" in names,
        loss_tokens=get_chunk_tokens(True, SHAPE.vocab) if "tiled_loss" in names else None,
        mlp_tokens=get_chunk_tokens(True, SHAPE.intermediate) if "tiled_mlp" in names else None,
        offload_checkpoints="offload_checkpoints" in names, offload_attention="offload_attention" in names,
    )  # fmt: skip
    peak = estimate(setting).peak
    if o.steps > 1:
        return peak
    # Adam makes its two moments at the end of the first step.
    states = peak.components["optimizer states"] - 2 * FLOAT * zero.share(SHAPE.parameters)
    return peak._replace(components=peak.components | {"optimizer states": states})


def wrong(options: str, o: argparse.Namespace, measured: MeasuredPeak, plan: MemoryMoment) -> str:
    """Return the contradiction to the options: a tensor that tiles rule out, a plan that is off; or ""."""
    local, names = o.tokens // o.ranks, set(read_names(options))
    wide = {"tiled_loss": local * SHAPE.vocab, "tiled_loss tiled_mlp": local * SHAPE.intermediate}
    for needed, elements in wide.items():
        # The whole embedding and its gradient are larger than short shards' rows.
        if names >= set(needed.split()) and measured.largest // 4 >= elements > SHAPE.parameters:
            return f"a tensor of {measured.largest / MIB:.1f} MiB with {needed}"
    ratio = plan.total / measured.peak
    return "" if abs(ratio - 1) <= PLANNED_WITHIN else f"planned {ratio:.3f} of the measured peak"


def memory(o: argparse.Namespace) -> Iterator[ResultRow]:
    """Yield a row for each set of options."""
    local, o.rounds = o.tokens // o.ranks, 1
    sizes = {"tokens x vocabulary": local * SHAPE.vocab, "tokens x intermediate": local * SHAPE.intermediate}
    sizes |= {"tokens x hidden": local * SHAPE.hidden, "embedding": SHAPE.vocab * SHAPE.hidden}
    names = {4 * elements: name for name, elements in sizes.items()}
    for options in o.options:
        ranks = run_ranks(measure_memory, o.ranks, (options, o), threads=1, deadline_s=o.deadline)
        measured, plan = max(ranks, key=lambda rank: rank.peak), planned(options, o)
        alive = sorted(measured.alive.items(), key=lambda item: -item[0] * item[1])[:8]
        results = {
            "peak_mib": round(measured.peak / MIB, 1), "planned_mib": round(plan.total / MIB, 1),
            "planned_over_measured": round(plan.total / measured.peak, 3),
            "largest_tensor_mib": round(measured.largest / MIB, 1),
            "tokens_x_vocabulary_mib": round(4 * local * SHAPE.vocab / MIB, 1),
            "tokens_x_intermediate_mib": round(4 * local * SHAPE.intermediate / MIB, 1),
            "alive": [f"{count} x {size / MIB:.1f} MiB {names.get(size, '')}" for size, count in alive],
            "planned": {name: round(size / MIB, 1) for name, size in plan.components.items() if size},
        }  # fmt: skip
        yield ResultRow({"options": options, "tokens": o.tokens}, results, wrong(options, o, measured, plan))


def prepare(o: argparse.Namespace) -> Turns:
    """Return a step of each set of options on this rank."""
    return Turns({options: partial(step, *start(options, o)) for options in o.options})


def time(o: argparse.Namespace) -> Iterator[ResultRow]:
    """Yield a row for each set of options; the ratio is to the first one."""
    measured, first = measure_on_ranks(prepare, o, o.deadline), o.options[0]
    for options in o.options:
        results = {"median_s": measured.median(options, "wall_s", 3)}
        results["fastest_s"] = round(min(measured.each(options, "wall_s")), 3)
        results["ratio"] = round(results["median_s"] / measured.median(first, "wall_s", 3), 3)
        yield ResultRow({"options": options, "tokens": o.tokens}, results)
