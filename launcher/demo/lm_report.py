"""The record of a training run: its rows as JSON and a picture of loss and memory."""

from __future__ import annotations

import json
import resource
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

from ds_ring.integrations.written_files import replace_text

from ..profile.pictures import new_figure, save_figure
from .lm_compare import Comparison

MIB = 2**20


@dataclass
class Report:
    """Hold one run, row by row."""

    title: str  # model, sizes and ring, in one line
    losses: list[float] = field(default_factory=list)  # mean over the step's tokens, before the step
    held_out: list[tuple[int, float]] = field(default_factory=list)  # (step, mean loss on other documents)
    tokens_per_second: list[float] = field(default_factory=list)  # of the whole world
    resident_mib: list[list[float]] = field(default_factory=list)  # memory of every rank after the step
    peak_mib: list[float] = field(default_factory=list)  # by rank
    comparison: Comparison | None = None  # the ring against one process, at the end

    def restore(self, state: dict[str, Any]) -> None:
        """Continue the rows of the run that wrote a checkpoint."""
        for key in ("losses", "held_out", "tokens_per_second", "resident_mib"):
            setattr(self, key, list(state[key]))

    def summary(self) -> str:
        """Return the run in one line, and the comparison in three."""
        first, last = self.losses[0], statistics.mean(self.losses[-10:])
        held_out = f", held out {self.held_out[-1][1]:.3f}" if self.held_out else ""
        peaks = " ".join(f"{peak:.0f}" for peak in self.peak_mib)
        return (
            f"loss {first:.3f} -> {last:.3f} ({100 * last / first:.0f} % of the start){held_out};"
            f" {statistics.median(self.tokens_per_second):.0f} tokens/s; peak memory per rank {peaks} MiB"
            + (f"\n{self.comparison.lines()}" if self.comparison else "")
        )

    def write(self, folder: Path) -> None:
        """Write log.json and training.png."""
        folder.mkdir(parents=True, exist_ok=True)
        replace_text(folder / "log.json", json.dumps(asdict(self), indent=1) + "\n")
        draw(self, folder / "training.png")


def memory_mib() -> tuple[float, float]:
    """Return the resident memory of this process now, and its peak; on CUDA those of its tensors."""
    if torch.cuda.is_available():
        return torch.cuda.memory_allocated() / MIB, torch.cuda.max_memory_allocated() / MIB
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
    return psutil.Process().memory_info().rss / MIB, peak_bytes / MIB


def draw_losses(axes: Any, report: Report) -> None:
    """Draw the loss of each step, and of the held-out documents."""
    axes.plot(range(1, len(report.losses) + 1), report.losses, label="training")
    if report.held_out:
        axes.plot(*zip(*report.held_out, strict=True), "o-", label="held-out documents")
    axes.set(xlabel="step", ylabel="loss per byte, nats", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()


def draw(report: Report, path: Path) -> None:
    """Draw the loss, and below it the memory of each rank: against one process if they were compared."""
    figure = new_figure(8, 7)
    loss_axes, memory_axes = figure.subplots(2, 1, height_ratios=(3, 2))
    loss_axes.set_title(report.title, fontsize=10)
    draw_losses(loss_axes, report)
    if (found := report.comparison) is None:
        memory_axes.plot(report.resident_mib, label=[f"rank {rank}" for rank in range(len(report.peak_mib))])
        memory_axes.set(xlabel="step", ylabel="memory per rank, MiB", ylim=(0, None))
        memory_axes.legend()
    else:
        names = ["one process", *(f"rank {rank}" for rank in range(len(found.ranks_mib)))]
        bars = memory_axes.barh(names, [found.alone_mib, *found.ranks_mib])
        memory_axes.bar_label(bars, fmt="%.0f MiB", padding=3)
        memory_axes.axvline(found.alone_mib / len(found.ranks_mib), color="black", linestyle="--")
        memory_axes.set_title("peak tensor memory of a pass; dashed: 1/P of one process", fontsize=10)
        memory_axes.invert_yaxis()
    save_figure(figure, path)
