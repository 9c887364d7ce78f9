"""Hold the result of a search; write it as a section of the JSON, as tables and as a hardware file."""

from __future__ import annotations

import copy
import os
import platform
import socket
import statistics
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from rich.table import Table

from ds_ring.config.json_text import SECTION, SP_KEY, Json
from ds_ring.config.section import RingConfig
from ds_ring.errors import RingConfigError
from ds_ring.plugin import FAST_KERNELS
from ds_ring.schedule.lowering import chunk_bytes_on

from ..plan.hardware import Hardware, hardware_from
from ..plan.layer_passes import LayerPass, slowest_pass, total_cost
from ..plan.pass_memory import PassShape
from ..plan.pass_time import BACKWARD_FLOPS, FORWARD_FLOPS
from ..tables import console, print_table
from .candidates import TuningCandidate, make_keys
from .model import Measured, Predicted, build_candidate_plan
from .request import TuningRequest


@dataclass(frozen=True)
class Finalist:
    """Hold the times of a candidate at the full length."""

    candidate: TuningCandidate  # which
    predicted_s: float  # what the model expected of a pass, forward and backward
    seconds: tuple[float, ...]  # what the slowest rank took, by round

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)


@dataclass(frozen=True)
class TuningResult:
    """Hold what `tune` found; the same on all ranks."""

    request: TuningRequest  # its cause
    measured: Measured  # what the machine gives
    chosen: TuningCandidate  # the best candidate
    predicted: Predicted  # what the model expected of it
    finalists: tuple[Finalist, ...]  # those timed at the full length, the fastest first
    default: TuningCandidate  # what the section's defaults come to; it is among the finalists
    # candidates, contestants: how many there were, and how many the model let into the race
    candidates: int
    contestants: int
    passes: int  # real passes that were timed
    seconds: float  # that all of it took
    ranks_per_node: int  # ranks on rank 0's host

    def finalist(self, candidate: TuningCandidate) -> Finalist:
        """Return the times of a candidate at the full length; KeyError if it was not in the final."""
        return {finalist.candidate: finalist for finalist in self.finalists}[candidate]

    @property
    def chosen_s(self) -> float:
        """Return median seconds of a pass of the choice."""
        return self.finalist(self.chosen).median_s

    @property
    def default_s(self) -> float:
        """Return median seconds of a pass of the defaults."""
        return self.finalist(self.default).median_s

    def section(self) -> Json:
        """Return the keys of the section that were chosen."""
        return make_keys(self.chosen, self.request, self.request.tokens)

    def merged(self, whole: Json) -> Json:
        """Return a DeepSpeed JSON with the choice in it, all else kept.

        Raises:
            RingConfigError: the rest of the JSON is refused.
        """
        # Keys that the choice leaves at their defaults are written only where the JSON has them already, or
        # where they say what was measured (sizes, layout, overlap).
        merged = copy.deepcopy(whole)
        section = dict(merged.get(SECTION, {}))
        plain = {"block_size": 128, "kernel_options": {}, "chunk_bytes": None}
        for key, value in self.section().items():
            if key in section or key not in plain or value != plain[key]:
                section[key] = value
        merged |= {SP_KEY: self.request.sequence_size, SECTION: section}
        RingConfig.from_deepspeed(merged)
        return merged

    def as_json(self) -> Json:
        """Return the result for machines: seconds, bytes and FLOPs, as in the attributes."""
        links, chosen = self.measured.links, self.finalist(self.chosen)
        return {
            "chosen": str(self.chosen),
            "section": {SP_KEY: self.request.sequence_size, SECTION: self.section()},
            "expected_s": chosen.predicted_s,
            "measured_s": chosen.median_s,
            "default": str(self.default),
            "default_s": self.default_s,
            "finalists": [
                {"candidate": str(f.candidate), "expected_s": f.predicted_s, "seconds": list(f.seconds)}
                for f in self.finalists
            ],
            "measured": {
                "matmul_flops": self.measured.matmul_flops,
                "kernels": [
                    dict(choice.options) | {"block_size": choice.block_size} | vars(rate)
                    for choice, rate in self.measured.kernels.items()
                ],
                "alone_speedup": self.measured.alone_speedup,
                "links": None if links is None else vars(links),
                "hop_overhead_s": self.measured.hop_overhead_s,
            },
            "candidates": self.candidates,
            "contestants": self.contestants,
            "passes": self.passes,
            "tokens": self.request.tokens,
            "seconds": self.seconds,
        }


def require_writable(path: Path, option: str) -> None:
    """Raise RingConfigError, before anything is measured, unless a file can be written at `path`."""
    try:
        folder = path.resolve().parent
        path.exists()
    except (OSError, ValueError, RuntimeError) as error:
        raise RingConfigError(f"{option}: expected a file's name, got {str(path)[:80]!r}: {error}") from None
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        got = "a folder" if path.is_dir() else "no folder" if not folder.is_dir() else "one that is not ours"
        raise RingConfigError.wrong(
            f"{option} {path}", "a file in a folder to write to", got, "choose another"
        )


def print_tables(result: TuningResult) -> None:
    """Print the tables on stdout."""
    here = console()
    print_table(_machine(result))
    here.print(_finals(result))  # names of candidates are broken between words, figures are not
    for line in _words(result):
        here.print(line)


def _machine(result: TuningResult) -> Table:
    measured, table = result.measured, Table(title="measured, every rank at work", title_justify="left")
    table.add_column("what")
    table.add_column("rate or time", justify="right")
    rate = measured.kernels[result.chosen.kernel]
    rows = [
        ("kernel, forward", f"{rate.forward_flops / 1e9:.1f} GFLOP/s"),
        ("kernel, backward", f"{rate.backward_flops / 1e9:.1f} GFLOP/s"),
        ("kernel, fixed cost of a tile", f"{(rate.forward_tile_s + rate.backward_tile_s) * 1e6:.0f} us"),
        ("large matrix product", f"{measured.matmul_flops / 1e9:.1f} GFLOP/s"),
        ("one rank alone is faster by", f"{measured.alone_speedup:.2f} x"),
    ]
    if (links := measured.links) is not None:
        rows += [
            ("to the next rank", f"{links.bytes_per_s / 2**20:.0f} MiB/s"),
            ("latency of a message", f"{links.latency_s * 1e6:.0f} us"),
            ("overhead of a hop", f"{measured.hop_overhead_s * 1e6:.0f} us"),
        ]
        if links.all_to_all_bytes_per_s is not None:
            rows.append(("all-to-all", f"{links.all_to_all_bytes_per_s / 2**20:.0f} MiB/s"))
    for row in rows:
        table.add_row(*row)
    return table


def _finals(result: TuningResult) -> Table:
    title = f"passes of {result.request.tokens} tokens, forward + backward, slowest rank"
    table = Table(title=title, title_justify="left")
    for name in ("which", "candidate"):
        table.add_column(name)
    for name in ("expected", "measured", "fastest\nto slowest"):
        table.add_column(name, justify="right", no_wrap=True)
    marks = {"chosen": result.chosen, "defaults": result.default}
    for finalist in result.finalists:
        mark = ", ".join(mark for mark, candidate in marks.items() if candidate == finalist.candidate)
        times = f"{finalist.predicted_s:.4f} s", f"{finalist.median_s:.4f} s"
        spread = f"{min(finalist.seconds):.4f} to {max(finalist.seconds):.4f}"
        table.add_row(mark, str(finalist.candidate), *times, spread)
    return table


def _words(result: TuningResult) -> list[str]:
    ratio = result.chosen_s / result.default_s
    lines = [
        f"chosen: {result.chosen}",
        f"expected {result.predicted.seconds:.4f} s (compute {result.predicted.compute_s:.4f}, transfer"
        f" {result.predicted.transfer_s:.4f}, overhead {result.predicted.overhead_s:.4f}), measured"
        f" {result.chosen_s:.4f} s, {ratio:.2f} of the defaults",
        f"{result.candidates} candidates, {result.contestants} raced, {result.passes} passes,"
        f" {result.seconds:.0f} s",
    ]
    if result.request.base.pattern.documents:
        lines.append("documents are each batch's own: measured without them")
    return lines


MAX_CHANGE = 4.0  # how far a pass can move the rate of the kernel; beyond that something else was measured


def describe_hardware(result: TuningResult) -> Json:
    """Describe this hardware; rates are per rank, with all ranks at work."""
    # A rank of the CPU counts as a device. What was not measured, with one rank, is not in it. Where the
    # choice has Ulysses ranks, whose exchanges `ds-ring plan` does not time, the kernel's own rate is used.
    whole_kernel = _describe(result, 1.0)
    if result.measured.links is None or result.chosen.ulysses_size > 1:
        return whole_kernel
    times = _slower(result, hardware_from(whole_kernel, "what tune measured"))
    description = _describe(result, times)
    description["source"]["attention_efficiency"] = (
        f"a pass of {result.request.tokens} tokens with the chosen section: {times:.2f} times the arithmetic"
        " of the kernel by itself, on a causal triangle"
    )
    return description


def _describe(result: TuningResult, times: float) -> Json:
    """Describe it with a kernel `times` slower than it was by itself."""
    request, measured, links = result.request, result.measured, result.measured.links
    kernel = measured.kernels[result.chosen.kernel]
    forward, backward = kernel.forward_flops / times, kernel.backward_flops / times
    peak = max(measured.matmul_flops, forward, backward)
    if request.device == "cuda":
        name = torch.cuda.get_device_name(0)
        memory_bytes = int(torch.cuda.get_device_properties(0).total_memory)
    else:  # a rank's part of the host's
        name = f"{platform.machine()} CPU, {os.cpu_count()} cores"
        memory_bytes = int(psutil.virtual_memory().total) // result.ranks_per_node
    description: Json = {
        "name": f"{name}, {result.ranks_per_node} ranks on {socket.gethostname()}",
        "kind": request.device,
        "memory_bytes": memory_bytes,
        "devices_per_node": result.ranks_per_node,
        "peak_flops": {request.dtype: peak},
        "attention_efficiency": {"forward": forward / peak, "backward": backward / peak},
        "matmul_efficiency": measured.matmul_flops / peak,
        "call_overhead_s": kernel.forward_tile_s,
    }
    if links is not None:
        description["intra_node_bytes_per_s"] = links.fastest_bytes_per_s
        description["inter_node_bytes_per_s"] = links.bytes_per_s
        description["link_latency_s"] = links.latency_s
        description["hop_overhead_s"] = measured.hop_overhead_s
    return description | {
        "source": {
            "all": f"ds-ring tune, torch {torch.__version__}, {request.world_size} ranks at once",
            "peak_flops": "the best of a large product of matrices and the attention kernel",
            "inter_node_bytes_per_s": "the slowest link of the ring",
            "intra_node_bytes_per_s": "the fastest link of the ring",
        }
    }


# [Note: the rate of a pattern]
# The kernel by itself is timed on a causal triangle. A window's strips and the branches of a dilated pattern
# are smaller calls with a bias, which run at another rate, as do the additions into accumulators between
# them. So the written rate is corrected by the chosen pass, timed at the full length with the pattern of the
# request: the time above the plan's figure is attributed to its arithmetic.
def _slower(result: TuningResult, hardware: Hardware) -> float:
    """Return seconds of arithmetic in the chosen pass over those planned; [Note: the rate of a pattern]."""
    request, chosen = result.request, result.chosen
    plans = [
        (build_candidate_plan(chosen, request, request.tokens, pattern), layers)
        for pattern, layers in request.mix
    ]
    chunk_bytes = result.section()["chunk_bytes"] or chunk_bytes_on(request.device, chosen.ring_size)
    shape = PassShape(
        request.batch, request.heads // request.kv_heads, plans[0][0].layout.local_tokens, request.head_dim,
        request.item_bytes, chunk_bytes, FAST_KERNELS[request.device],
    )  # fmt: skip
    link = hardware.inter_node_bytes_per_s
    rates = (hardware, request.dtype, link, chosen.overlap)
    passes = [LayerPass(plan.pattern, layers, slowest_pass(plan, shape, *rates)) for plan, layers in plans]
    planned, count = total_cost(passes), sum(layers for _, layers in plans)
    efficiency = hardware.attention_efficiency
    per_pair = FORWARD_FLOPS / efficiency.forward + BACKWARD_FLOPS / efficiency.backward
    arithmetic = planned.executed * request.head_dim * per_pair / hardware.flops(request.dtype)
    took = arithmetic + count * result.chosen_s - planned.seconds  # `chosen_s` is a layer's mean
    return min(max(took / arithmetic, 1 / MAX_CHANGE), MAX_CHANGE)
