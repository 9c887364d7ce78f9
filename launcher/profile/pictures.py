"""Draw the pictures of a profile: memory by ring size, memory by step, the timeline.

matplotlib is imported when a picture is drawn.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ds_ring.errors import RingConfigError
from ds_ring.simulation.rank import COMPONENTS, RankMemory
from ds_ring.written_files import replaced

from .measure import MIB, RingRun
from .timeline import WHATS, Timeline

# By component, for legends; in the order in which they are stacked.
LABELS = {
    "q": "q shard",
    "kv": "K/V shard",
    "in_flight": "K/V, dK/dV in flight",
    "accumulators": "accumulators",
    "out": "out",
    "lse": "lse",
    "grad_out": "grad_out",
    "gradients": "dq, dk, dv",
    "workspace": "workspace",
    "between": "between steps",  # a peak outside of all steps
}


@dataclass(frozen=True)
class Bar:
    """Hold the peak of the rank that needs most, bytes."""

    kind: str  # "real" or "simulated"
    ring_size: int  # P
    ring_rank: int  # which
    parts: dict[str, int]  # by component, at the peak
    total_bytes: int  # their sum


class Line(NamedTuple):
    """Describe memory that falls as 1/P from the smallest ring on."""

    ring_size: int
    total_bytes: int

    def at(self, ring_size: float) -> float:
        """Return bytes per rank of a ring of this size."""
        return self.total_bytes * self.ring_size / ring_size


def bars_of(runs: Sequence[RingRun]) -> list[Bar]:
    """Return one bar for each run."""
    bars = []
    for run in runs:
        memory = run.ranks[run.busiest].memory
        bars.append(Bar(run.kind, run.ring_size, run.busiest, parts_of(memory), memory.peak_bytes))
    return bars


def parts_of(memory: RankMemory) -> dict[str, int]:
    """Return bytes by component at a rank's peak; they sum to the peak."""
    return memory.components | {"between": memory.peak_bytes - memory.at_peak.total}


def one_over_p(bars: Sequence[Bar]) -> Line:
    """Return the line through the smallest ring's bar, the first one where there are two."""
    first = min(bars, key=lambda bar: bar.ring_size)
    return Line(first.ring_size, first.total_bytes)


def shown_parts(bars: Sequence[Bar]) -> list[str]:
    """Return the components that any bar has, in the order of the stack."""
    return [name for name in LABELS if any(bar.parts[name] for bar in bars)]


def steps_by_part(memory: RankMemory) -> dict[str, list[int]]:
    """Return bytes by component and step, without components that are never used."""
    parts = {name: [getattr(step, name) for step in memory.steps] for name in COMPONENTS}
    return {name: sizes for name, sizes in parts.items() if any(sizes)}


# Colour-blind safe (Okabe and Ito 2008), and a few greys.
PART_COLOURS = {
    "q": "#56b4e9", "kv": "#0072b2", "in_flight": "#d55e00", "accumulators": "#f0e442", "out": "#009e73",
    "lse": "#004d38", "grad_out": "#e69f00", "gradients": "#cc79a7", "workspace": "#999999",
    "between": "#444444",
}  # fmt: skip
WHAT_COLOURS = {"compute": "#0072b2", "send": "#e69f00", "wait": "#d55e00"}
BACKWARD_SHADE = "#f2ece0"
HATCH = {"real": "", "simulated": "///"}
DPI = 110
TITLE_WIDTH = 84  # characters: a title leaves space for the legend
NAMED_WIDTH = 0.025  # of the time axis: an event at least so wide has its hop written in it


def new_figure(width_inches: float, height_inches: float) -> Any:
    """Return an empty matplotlib figure."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RingConfigError(
            f"pictures: expected matplotlib, got: {error}; pip install 'ds_ring[plot]', or --no-pictures"
        ) from None
    return Figure(figsize=(width_inches, height_inches), layout="constrained")


def save_figure(figure: Any, path: str | Path) -> None:
    """Write a picture in the format of its name's ending."""
    path = Path(path)
    with replaced(path) as file:
        figure.savefig(file, dpi=DPI, format=path.suffix[1:] or "png")


def draw_memory(runs: Sequence[RingRun], title: str, path: Path) -> None:
    """Draw stacked bars of the peak, one for each ring size and kind, with the 1/P line.

    Raises:
        RingConfigError: matplotlib is not installed.
    """
    figure = new_figure(10, 5.6)
    axes = figure.subplots()
    bars, kinds = bars_of(runs), sorted({run.kind for run in runs})
    width = 0.72 / len(kinds)  # in powers of two
    for bar in bars:
        place = math.log2(bar.ring_size) + (kinds.index(bar.kind) - (len(kinds) - 1) / 2) * width
        _stack(axes, bar, place, width * 0.92, HATCH[bar.kind] if len(kinds) > 1 else "")
        axes.annotate(
            f"{bar.total_bytes / MIB:.1f}", (place, bar.total_bytes / MIB), (0, 3), ha="center",
            textcoords="offset points", fontsize=9, zorder=6,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0},
        )  # fmt: skip
    sizes = sorted({bar.ring_size for bar in bars})
    line = one_over_p(bars)
    _draw_line(axes, line, sizes[-1])
    axes.set_xticks([math.log2(size) for size in sizes], [str(size) for size in sizes])
    axes.set(xlabel="ring size P (log 2)", ylabel="peak tensor memory of a rank, MiB")
    axes.set_ylim(0, 1.1 * max(bar.total_bytes for bar in bars) / MIB)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    axes.set_title(_wrapped("Memory of the rank that needs most", title), fontsize=10)
    _memory_legend(figure, shown_parts(bars), kinds, f"1/P from ring {line.ring_size}")
    save_figure(figure, path)


def _stack(axes: Any, bar: Bar, place: float, width: float, hatch: str) -> None:
    """Draw one bar, part on part."""
    bottom = 0.0
    for name, size in bar.parts.items():
        if size:
            axes.bar(
                place, size / MIB, width, bottom, color=PART_COLOURS[name], hatch=hatch,
                edgecolor="white", linewidth=0.5,
            )  # fmt: skip
            bottom += size / MIB


def _draw_line(axes: Any, line: Line, largest: int) -> None:
    """Draw 1/P dashed, on a white edge so that it is seen on every colour."""
    from matplotlib.patheffects import withStroke

    first, last = math.log2(line.ring_size), math.log2(largest)
    places = [first + (last + 0.4 - first) * i / 100 for i in range(101)]
    sizes = [line.at(2**place) / MIB for place in places]
    outline = [withStroke(linewidth=3.6, foreground="white")]
    axes.plot(places, sizes, "--", color="black", linewidth=1.8, zorder=5, path_effects=outline)


def _memory_legend(figure: Any, parts: Sequence[str], kinds: Sequence[str], line: str | None) -> None:
    """Draw the legend to the right of the axes, in the order of the stack from its top."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [Patch(color=PART_COLOURS[name], label=LABELS[name]) for name in reversed(parts)]
    if line is not None:
        handles.insert(0, Line2D([], [], color="black", linestyle="--", label=line))
    if len(kinds) > 1:
        handles += [Patch(facecolor="#bbbbbb", edgecolor="white", hatch=HATCH[k], label=k) for k in kinds]
    figure.legend(handles=handles, loc="outside right upper", fontsize=9)


def draw_steps(runs: Sequence[RingRun], title: str, path: Path) -> None:
    """Draw memory step by step, forward and backward, of each run's rank that needs most.

    Raises:
        RingConfigError: matplotlib is not installed.
    """
    figure = new_figure(10, 1.4 + 3.4 * len(runs))
    panels = figure.subplots(len(runs), 1, squeeze=False, sharey=True)[:, 0]
    parts: dict[str, None] = {}
    for axes, run in zip(panels, runs, strict=True):
        memory = run.ranks[run.busiest].memory
        by_part = steps_by_part(memory)
        parts |= dict.fromkeys(by_part)
        edges = [number - 0.5 for number in range(len(memory.steps) + 1)]
        bottom = [0.0] * len(memory.steps)
        for name, sizes in by_part.items():
            top = [low + size / MIB for low, size in zip(bottom, sizes, strict=True)]
            sides = ([*bottom, bottom[-1]], [*top, top[-1]])
            axes.fill_between(edges, *sides, step="post", color=PART_COLOURS[name], linewidth=0)
            bottom = top
        peak = memory.peak_bytes / MIB
        axes.axhline(peak, color="black", linestyle=":", linewidth=1)
        axes.set_title(
            f"{run.kind}, ring {run.ring_size}, rank {run.busiest}: peak {peak:.1f} MiB", fontsize=10
        )
        axes.set(xlim=(edges[0], edges[-1]), ylabel="tensor memory, MiB")
        _mark_phases(axes, [step.phase for step in memory.steps], 1.12 * max(*bottom, peak))
        # Every step is labelled with its hop where there are few; in the last ones only gradients return.
        if len(memory.steps) <= 40:
            names = [str(step.hop) if step.hop < run.ring_size else "end" for step in memory.steps]
            axes.set_xticks(range(len(names)), names, fontsize=8)
            axes.set_xlabel("hop that is computed, step by step (it begins again with every group of heads)")
        else:
            axes.set_xlabel("step (a hop of a group of heads)")
    figure.suptitle(_wrapped("Memory at the peak of every step", title), fontsize=10)
    _memory_legend(figure, [name for name in LABELS if name in parts], [], None)
    save_figure(figure, path)


def _mark_phases(axes: Any, phases: Sequence[str], top: float) -> None:
    """Write above the steps which pass they belong to."""
    axes.set_ylim(0, top)
    for phase in dict.fromkeys(phases):
        where = [number for number, each in enumerate(phases) if each == phase]
        axes.text((where[0] + where[-1]) / 2, 0.985 * top, phase, ha="center", va="top", fontsize=10)
        if where[0]:
            axes.axvline(where[0] - 0.5, color="black", linewidth=1)


def draw_timeline(timelines: Sequence[Timeline], title: str, path: Path) -> None:
    """Draw a row for each rank, a panel for each timeline; the backward pass on a shaded ground.

    Raises:
        RingConfigError: matplotlib is not installed.
    """
    rows = max(timeline.ring_size for timeline in timelines)
    height = min(max(0.42 * rows, 1.2), 9.0)
    figure = new_figure(12, 1.3 + (height + 0.9) * len(timelines))
    panels = figure.subplots(len(timelines), 1, squeeze=False)[:, 0]
    for axes, timeline in zip(panels, timelines, strict=True):
        _timeline_panel(axes, timeline)
    from matplotlib.patches import Patch

    handles = [Patch(color=WHAT_COLOURS[what], label=what) for what in WHATS]
    handles.append(Patch(facecolor=BACKWARD_SHADE, edgecolor="#999999", label="backward"))
    figure.suptitle(_wrapped("Who does what when", title), fontsize=10)
    figure.legend(handles=handles, loc="outside right upper", fontsize=9)
    save_figure(figure, path)


def _timeline_panel(axes: Any, timeline: Timeline) -> None:
    """Draw one timeline; numbers in the blocks are hops."""
    end_ms = timeline.end_us / 1e3
    for rank in range(timeline.ring_size):
        events = timeline.of_rank(rank)
        back = [event for event in events if event.phase == "backward"]
        if back:
            where = [(back[0].start_us / 1e3, (back[-1].end_us - back[0].start_us) / 1e3)]
            axes.broken_barh(where, (rank - 0.5, 1.0), facecolor=BACKWARD_SHADE, zorder=1)
        for what in WHATS:
            mine = [event for event in events if event.what == what]
            axes.broken_barh(
                [(event.start_us / 1e3, event.duration_us / 1e3) for event in mine], (rank - 0.38, 0.76),
                facecolor=WHAT_COLOURS[what], edgecolor="white", linewidth=0.3 if what == "compute" else 0,
                zorder=2,
            )  # fmt: skip
        for event in events:
            if event.what == "compute" and event.duration_us / 1e3 > NAMED_WIDTH * end_ms:
                middle = (event.start_us + event.end_us) / 2e3
                place = {"ha": "center", "va": "center", "fontsize": 8, "zorder": 3}
                axes.text(middle, rank, str(event.hop), color="white", **place)
    axes.set(xlim=(0, end_ms), ylim=(timeline.ring_size - 0.45, -0.55), xlabel="ms", ylabel="ring rank")
    step = -(-timeline.ring_size // 16)
    axes.set_yticks(range(0, timeline.ring_size, step))
    title = f"{timeline.kind}: {timeline.note}; numbers are hops"
    axes.set_title("\n".join(textwrap.wrap(title, TITLE_WIDTH)), fontsize=10)


def _wrapped(first: str, title: str) -> str:
    return "\n".join([first, *textwrap.wrap(title, TITLE_WIDTH)])
