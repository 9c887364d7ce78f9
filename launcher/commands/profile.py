"""Draw memory by ring size and by step, and what each rank does when: `ds-ring profile`."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .parsers import (
    MIB,
    Commands,
    add_command,
    add_json,
    add_shapes,
    config_of,
    pattern_of,
    print_json,
    refuse_extra,
    require_sizes,
    source_of,
    writing_to,
)

if TYPE_CHECKING:
    from tqdm import tqdm

    from ..profile.measure import ProfileJob, RingRun
    from ..profile.timeline import Timeline


def row_of(run: RingRun) -> dict[str, Any]:
    """Return a ring for machines; bytes, those of `at_peak` of the rank that needs most."""
    from ..profile.pictures import parts_of

    return {
        "run": run.kind,
        "ring_size": run.ring_size,
        "layout": run.layout_name,
        "peak_bytes": run.peak_bytes,
        "ring_rank": run.busiest,
        "at_peak": parts_of(run.ranks[run.busiest].memory),
        "peak_bytes_by_rank": [rank.memory.peak_bytes for rank in run.ranks],
    }


def times_of(timeline: Timeline) -> dict[str, Any]:
    """Return a timeline for machines; milliseconds by ring rank."""
    from ..profile.timeline import WHATS

    ranks = range(timeline.ring_size)
    spent = {
        f"{what}_ms": [round(timeline.total_us(rank, what) / 1e3, 3) for rank in ranks] for what in WHATS
    }
    return {
        "timeline": timeline.kind, "ring_size": timeline.ring_size, "note": timeline.note,
        "wall_ms": round(timeline.end_us / 1e3, 3), **spent,
    }  # fmt: skip


def print_memory(job: ProfileJob, runs: list[RingRun]) -> None:
    """Print a table of peaks and their parts, a row for each ring."""
    from rich.table import Table

    from ..profile.pictures import LABELS, bars_of, one_over_p, shown_parts
    from ..tables import print_table

    bars = bars_of(runs)
    parts, line = shown_parts(bars), one_over_p(bars)
    table = Table(title=f"{job.title}: MiB of the rank that needs most", caption_justify="left")
    for name in ("ring", "run", "layout", "rank", "peak", "of 1/P", *(LABELS[part] for part in parts)):
        table.add_column(name, justify="left" if name in ("run", "layout") else "right")
    for run, bar in zip(runs, bars, strict=True):
        table.add_row(
            str(bar.ring_size), bar.kind, run.layout_name, str(bar.ring_rank), f"{bar.total_bytes / MIB:.2f}",
            f"{bar.total_bytes / line.at(bar.ring_size):.3f}",
            *(f"{bar.parts[part] / MIB:.2f}" for part in parts),
        )  # fmt: skip
    print_table(table)


def print_times(timelines: list[Timeline]) -> None:
    """Print a table for each timeline, a row for each rank."""
    from rich.table import Table

    from ..profile.timeline import WHATS
    from ..tables import console, print_table

    for timeline in timelines:
        title = f"\ntimeline of ring {timeline.ring_size}, {timeline.kind}: {timeline.note}"
        console().print(title, markup=False)
        table = Table(caption=f"ms of {timeline.end_us / 1e3:.1f}")
        for name in ("rank", *WHATS):
            table.add_column(name, justify="right")
        for rank in range(timeline.ring_size):
            spent = [timeline.total_us(rank, what) for what in WHATS]
            table.add_row(str(rank), *(f"{us / 1e3:.1f}" for us in spent))
        print_table(table)


_HELP = "draw what each rank of a ring needs and does, with real ranks of this machine or virtual ones"
_DESCRIPTION = (
    "Memory of a rank against ring size and hop by hop, and a timeline of computing, sending and "
    "waiting, of virtual ranks (one at a time, transfers modelled) or of real gloo ranks here."
)
_EXAMPLE = """\
examples:
  ds-ring profile --tokens 8192 --ring-sizes 1 2 4 8                      virtual ranks, a link of 10 Gbit/s
  ds-ring profile --tokens 16384 --ring-sizes 1 2 --real --simulated      gloo ranks beside virtual ones
  ds-ring profile --tokens 65536 --pattern '{"window": 4096}' --link-mbit 1000 --output runs/window
  ds-ring profile --tokens 32768 --config configs/longnet.json --forward-only --json
  ds-ring profile --tokens 16384 --ring-sizes 1 4 --hf-config config.json            layers that differ

writes FOLDER/memory.png (peak by ring size, against 1/P), steps.png (memory hop by hop) and, of the largest
ring, timeline.png and trace.json (open it in chrome://tracing or https://ui.perfetto.dev)
"""
PICTURES = ("memory.png", "steps.png", "timeline.png")
PROGRESS_AFTER_S = 2.0


def add(commands: Commands) -> None:
    """Add the command."""
    parser = add_command(commands, "profile", run, _HELP, _DESCRIPTION, _EXAMPLE)
    add_shapes(parser, [1, 2, 4, 8])
    parser.add_argument(
        "--hf-config", metavar="FILE", help="a transformers config.json: each pattern of its layers by itself"
    )
    parser.add_argument(
        "--layers", type=int, metavar="N", help='of the model, where "layers" of the pattern names some'
    )
    parser.add_argument("--forward-only", action="store_true", help="without the backward pass")
    parser.add_argument("--simulated", action="store_true", help="virtual ranks (if neither is given)")
    parser.add_argument("--real", action="store_true", help="start gloo ranks on this machine")
    parser.add_argument(
        "--link-mbit",
        type=float,
        default=10_000.0,
        metavar="RATE",
        help="of the modelled link of each virtual rank, Mbit/s each way (10000)",
    )
    parser.add_argument("--threads", type=int, default=1, help="of each rank, real or virtual (1)")
    parser.add_argument(
        "--timeout", type=float, default=600.0, metavar="SECONDS", help="for each real ring (600)"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("runs/profile"), metavar="FOLDER", help="(runs/profile)"
    )
    parser.add_argument("--no-pictures", action="store_true", help="write trace.json alone")
    add_json(parser)


def run(options: argparse.Namespace, extra_args: tuple[str, ...]) -> int:
    """Measure, print, draw; RingError for what cannot be."""
    refuse_extra("profile", extra_args)
    require_sizes(options, {"threads": 1024})
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's library greets on stderr
    jobs = _jobs(options)
    sizes = sorted(set(options.ring_sizes))
    below = [f"pattern-{number}" for number in range(1, len(jobs) + 1)] if len(jobs) > 1 else [""]
    folders = [options.output / name for name in below]
    for job, folder in zip(jobs, folders, strict=True):
        _check(options, job, sizes, folder)
    found = [_profiled(options, job, sizes, folder) for job, folder in zip(jobs, folders, strict=True)]
    if options.json:  # one object for each pattern where there are several
        print_json(found[0] if len(jobs) == 1 else {"patterns": found})
    return 0


def _profiled(options: argparse.Namespace, job: ProfileJob, sizes: list[int], folder: Path) -> dict[str, Any]:
    """Measure, draw and print one pattern; return what `--json` prints of it."""
    # Only the largest ring is drawn in time: the pictures of small ones say little.
    runs = _measured(options, job, sizes)
    timelines = _timelines(options, [one for one in runs if one.ring_size == sizes[-1]])
    written = _write(options, job, runs, timelines, folder)
    if not options.json:
        print_memory(job, runs)
        print_times(timelines)
    for path in written:
        print(f"written: {path}", file=sys.stderr if options.json else sys.stdout)
    layers = dict(job.mix).get(job.pattern)
    named = {} if layers is None else {"pattern": str(job.pattern), "layers": layers}
    return named | {
        "rings": [row_of(one) for one in runs],
        "timelines": [times_of(one) for one in timelines],
        "files": [str(path) for path in written],
    }


def _jobs(options: argparse.Namespace) -> list[ProfileJob]:
    """Return a job for every pattern of the model's layers."""
    config, source = config_of(options), source_of(options)
    from ds_ring.ops.options import Options

    from ..plan.model_file import mix_of, model_patterns_of, with_layer_types
    from ..profile.measure import ProfileJob

    how = Options(
        kernel=config.kernel,
        kernel_options=config.kernel_options,
        prune=config.prune,
        gradient_payload=config.gradient_payload,
        kv_payload=config.kv_payload,
        stage_bytes=config.stage_bytes,
        chunk_bytes=options.chunk_bytes,
        hop_timeout_seconds=options.timeout if options.timeout > 0 else 1.0,
    )
    job = ProfileJob(
        source.geometry,
        pattern_of(options, config),
        options.layout or config.layout,
        how,
        not options.forward_only,
        options.seed,
        options.threads,
    )
    model = None if options.hf_config is None else json.dumps(with_layer_types(options.hf_config))
    model_patterns = model_patterns_of(model, options.layers)
    if model_patterns is None:
        return [job]
    mix = mix_of(config, model_patterns, options.tokens)
    return [replace(job, pattern=pattern, mix=mix) for pattern, _ in mix]


def _check(options: argparse.Namespace, job: ProfileJob, sizes: list[int], folder: Path) -> None:
    """Raise all errors that are known before the first run."""
    from ds_ring.errors import RingConfigError

    from ..profile.pictures import new_figure

    for name, value in (("--link-mbit", options.link_mbit), ("--timeout", options.timeout)):
        if not 0 < value < float("inf"):
            raise RingConfigError(f"{name}: expected a number above 0, got {value:g}")
    job.check(sizes)
    if not options.no_pictures:
        new_figure(1, 1)
    with writing_to(folder):
        folder.mkdir(parents=True, exist_ok=True)
        # To find a full or read-only disk now, not after minutes of measuring.
        with tempfile.TemporaryFile(dir=folder):
            pass


def _measured(options: argparse.Namespace, job: ProfileJob, sizes: list[int]) -> list[RingRun]:
    """Measure every ring size, real and simulated as chosen; times of the largest one."""
    from tqdm import tqdm

    from ..profile.measure import REAL, SIMULATED, RingRun, measure_ring, measure_virtual
    from ..run.local_ranks import run_ranks

    kinds = [REAL] * options.real + [SIMULATED] * (options.simulated or not options.real)
    runs = []
    bar = tqdm(
        total=len(sizes) * len(kinds), desc="rings", unit="ring", delay=PROGRESS_AFTER_S, leave=False,
        disable=None,
    )  # fmt: skip
    with bar:
        ticks = _Ticks(bar)
        for size in sizes:
            times = size == sizes[-1]
            for kind in kinds:
                bar.set_postfix_str(f"{kind}, {size}", refresh=False)
                if kind == SIMULATED:
                    runs.append(measure_virtual(job, size, times))
                else:
                    ranks = run_ranks(
                        measure_ring, size, (job, times),
                        threads=job.threads, deadline_s=options.timeout, waiting=ticks,
                    )  # fmt: skip
                    runs.append(RingRun(kind, job.layout(size).name, tuple(ranks)))
                bar.update()
    return runs


class _Ticks:
    """Draw a bar again while real ranks are at work: every second on a terminal, seldom in a log."""

    def __init__(self, bar: tqdm[Any]) -> None:
        self._bar, self._due = bar, time.monotonic() + PROGRESS_AFTER_S
        self._every_s = 1.0 if sys.stderr.isatty() else 30.0

    def __call__(self) -> None:
        if time.monotonic() > self._due:
            self._due = time.monotonic() + self._every_s
            self._bar.refresh()


def _timelines(options: argparse.Namespace, runs: list[RingRun]) -> list[Timeline]:
    from ..profile.measure import REAL
    from ..profile.timeline import replay, this_machine, timeline_of

    return [
        timeline_of(one.traces, where=this_machine(one.ring_size, options.threads))
        if one.kind == REAL
        else replay(one.traces, options.link_mbit)
        for one in runs
    ]


def _write(
    options: argparse.Namespace, job: ProfileJob, runs: list[RingRun], timelines: list[Timeline], folder: Path
) -> list[Path]:
    """Write the files."""
    from ds_ring.written_files import replace_text

    from ..profile.pictures import draw_memory, draw_steps, draw_timeline
    from ..profile.timeline import chrome_trace

    trace = folder / "trace.json"
    replace_text(trace, json.dumps(chrome_trace(timelines, job.title)) + "\n")
    if options.no_pictures:
        return [trace]
    memory, steps, timeline = (folder / name for name in PICTURES)
    largest = max(one.ring_size for one in runs)
    draw_memory(runs, job.title, memory)
    draw_steps([one for one in runs if one.ring_size == largest], job.title, steps)
    draw_timeline(timelines, job.title, timeline)
    return [memory, steps, timeline, trace]
