"""Compare the planner's model with what others have measured and published; computed, not measured.

The first rows are published steps and longest sequences beside the planner's (`published/steps.py`), then
ds_ring's figures for settings that others published, then packed documents on ds_ring's ring, in stages of
`STAGE_SHARDS` shards and by a direct exchange: means over packs, forward and backward. No constant is fitted.
`tools/results/published.md` has the passes of other methods.

Example:
    python tools/bench.py published --devices 8 64 --markdown
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from published.own import Pass, compute_own_pass
from published.packs import get_packs
from published.steps import longest_tokens, make_published_setting, torch_step, ulysses_tflops
from published.table import LengthRow, StepRow, Table, published

from benchmarks.measuring import ResultRow
from ds_ring.plugin import PASSES
from ds_ring_launcher.plan.estimate import estimate
from ds_ring_launcher.plan.hardware import read_hardware

CLOSE = 0.1  # a figure holds that is so close to the published one
PACK_COUNTS = {256: 2, 1024: 1}  # by devices, of how many packs a mean is taken: large plans take seconds
FEW_PACKS = 6  # the same of fewer devices
STAGE_SHARDS = 4  # of which "stage_bytes" in the JSON has the bytes
OPTIONS = {"devices": ([8, 16, 32, 64, 256, 1024], "numbers of GPUs of the packed rows")}

# the pass that plans an exchange of its own; the ring where its folder was removed
DIRECT = next((name for name, row in PASSES.items() if row.plans), "ring")


def run(options: argparse.Namespace) -> Iterator[ResultRow]:
    """Yield a row for each figure."""
    table = published()
    yield from compare_with_published(table)
    yield from predict(table)
    yield from model_packed_rows(table, options.devices)


def compare_with_published(table: Table) -> Iterator[ResultRow]:
    """Yield the published steps and lengths, with the model's figure beside each."""
    for row in table.steps:
        setting = f"{row.model}, {row.tokens:,} tokens"
        if row.tflops is not None:
            yield _row(table, row, setting, "step, TFLOPS a GPU", row.tflops, ulysses_tflops(table, row))
            continue
        seconds, gigabytes = torch_step(table, row)
        if row.seconds is not None:
            yield _row(table, row, setting, "step, seconds", row.seconds, seconds)
        if row.gigabytes is not None:
            yield _row(table, row, setting, "peak, GB", row.gigabytes, gigabytes)
    for length in table.lengths:
        model = longest_tokens(table, length)
        yield _row(table, length, length.model, "longest sequence, tokens", length.tokens, model)


def _row(
    table: Table, row: StepRow | LengthRow, setting: str, quantity: str, figure: float, model: float
) -> ResultRow:
    case = {
        "part": "published", "source": row.source, "date": str(table.sources[row.source].date),
        "method": row.method, "setting": setting, "devices": row.devices, "quantity": quantity,
    }  # fmt: skip
    ratio = model / figure
    holds = abs(ratio - 1) <= CLOSE
    results = {"published": figure, "model": model, "ratio": ratio, "holds": holds, "why": row.why}
    return ResultRow(case, results, "" if holds or row.why else f"{setting}: off, and nothing says why")


def predict(table: Table) -> Iterator[ResultRow]:
    """Yield ds_ring's figures of causal passes on H100, and of TRL's steps, beside the best published one."""
    machine, kernel, case = table.machines["h100"], table.kernels["flash3"], {"part": "ds_ring"}
    peers = [row for row in table.passes if row.mask == "causal"]
    for ranks in peers[0].forward:
        attention = Pass(machine, kernel, ranks, (ranks * 8192,))
        forward_s, backward_s = compute_own_pass(attention).seconds
        for way, seconds in (("forward", forward_s), ("backward", backward_s / 2.5)):
            figure, method = max((getattr(row, way)[ranks], row.method) for row in peers)
            yield ResultRow(
                case | {"setting": "h100 causal", "devices": ranks, "quantity": f"{way}, TFLOPS a GPU"},
                {"model": attention.flops / seconds / 1e12, "best_published": f"{figure:,.0f} ({method})"},
            )
    # of two figures for one setting the later one
    latest = {(row.model, row.tokens, row.devices): row for row in table.steps if row.seconds is not None}
    for row in latest.values():
        step = estimate(replace(make_published_setting(table, row), hardware=read_hardware("h100_flash3")))
        setting = f"{row.model}, {row.tokens:,} tokens"
        yield ResultRow(
            case | {"setting": setting, "devices": row.devices, "quantity": "step, seconds"},
            {"model": step.step_s - step.host_s, "best_published": f"{row.seconds:,.0f} ({row.method})"},
        )


def model_packed_rows(table: Table, devices: Sequence[int], packs: int = FEW_PACKS) -> Iterator[ResultRow]:
    """Yield a row for each number of devices: TFLOPS a GPU, forward and backward, and what limits them.

    `imbalance` is work, maximum over mean; `needed` and `sent` are K/V that a rank reads, and that it sends,
    over those of an all-gather; `exposed`, `fixed`, `merging` are parts of the ring's time; `kept` is of both
    passes together, over the ring's on the first number of devices.
    """
    machine, kernel = table.machines["h100"], table.kernels["flash3"]
    peer = next(row for row in table.passes if row.mask == "packed")
    first = 0.0
    for ranks in devices:
        layout, draws = "", []
        for lengths in get_packs(ranks * 8192)[: min(PACK_COUNTS.get(ranks, packs), packs)]:
            attention = Pass(machine, kernel, ranks, lengths)
            ring, staged = compute_own_pass(attention), compute_own_pass(attention, STAGE_SHARDS)
            direct = compute_own_pass(attention, transport=DIRECT)
            layout, others = ring.layout, attention.tokens * (ranks - 1)
            parts = (ring.imbalance, ring.reads / others, ring.sent, ring.exposed, ring.fixed, ring.merging)
            times = [*ring.seconds, *staged.seconds, *direct.seconds, *ring.kernel_s]
            draws.append([*parts, *(np.tile([1, 2.5], 4) * attention.flops / 1e12 / times)])
        mean = np.mean(draws, axis=0).tolist()
        names = ("imbalance", "needed", "sent", "exposed", "fixed", "merging")
        tflops = zip(mean[6::2], mean[7::2], strict=True)
        pairs = dict(zip(("ring", "staged", "direct", "kernel"), tflops, strict=True))
        figures = (peer.forward[ranks], peer.backward[ranks]) if ranks in peer.forward else None
        results = {"published": figures, "layout": layout, **dict(zip(names, mean[:6], strict=True)), **pairs}
        both = {name: 3.5 / (1 / forward + 2.5 / backward) for name, (forward, backward) in pairs.items()}
        first = first or both["ring"]
        shares = {f"{name}_kept": both[name] / first for name in ("ring", "staged", "direct")}
        yield ResultRow({"part": "packed", "devices": ranks}, results | shares)
