"""What a training run leaves behind: its rows as JSON and a picture of loss and memory.

Owns the format of `log.json` and of the picture; measures memory of this process, trains nothing.
"""

from __future__ import annotations

import json
import resource
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

from ds_ring.config.json_text import replace_text, replaced

from .lm_compare import Comparison

MIB = 2**20


@dataclass
class Report:
    """One run, row by row."""

    title: str  # what was trained, in one line
    losses: list[float] = field(default_factory=list)  # mean over the step's tokens, before the step
    # (steps done, mean loss on held-out documents)
    held_out: list[tuple[int, float]] = field(default_factory=list)
    tokens_per_second: list[float] = field(default_factory=list)  # of the whole world
    # resident memory of every rank after the step
    resident_mib: list[list[float]] = field(default_factory=list)
    # the most that every rank has had, and whose memory that is
    peak_mib: list[float] = field(default_factory=list)
    comparison: Comparison | None = None  # the ring against one process, at the end

    def restore(self, state: dict[str, Any]) -> None:
        """Continue the rows of the run that wrote a checkpoint."""
        for key in ("losses", "held_out", "tokens_per_second", "resident_mib"):
            setattr(self, key, list(state[key]))

    def ends(self) -> tuple[float, float]:
        """Loss of the first step, and mean loss of the last ten."""
        last = self.losses[-10:]
        return self.losses[0], sum(last) / len(last)

    def summary(self) -> str:
        """The run in one line, and the comparison in three."""
        first, last = self.ends()
        held_out = f", held out {self.held_out[-1][1]:.3f}" if self.held_out else ""
        speeds = sorted(self.tokens_per_second)
        peaks = " ".join(f"{peak:.0f}" for peak in self.peak_mib)
        return (
            f"loss {first:.3f} -> {last:.3f} ({100 * last / first:.0f} % of the start){held_out};"
            f" {speeds[len(speeds) // 2]:.0f} tokens/s; peak memory per rank {peaks} MiB"
            + (f"\n{self.comparison.lines()}" if self.comparison else "")
        )

    def write(self, folder: Path) -> None:
        """log.json and training.png."""
        folder.mkdir(parents=True, exist_ok=True)
        replace_text(folder / "log.json", json.dumps(asdict(self), indent=1) + "\n")
        draw(self, folder / "training.png")


def memory_mib() -> tuple[float, float]:
    """Resident memory of this process now, and its peak; on CUDA what its tensors take."""
    if torch.cuda.is_available():
        return torch.cuda.memory_allocated() / MIB, torch.cuda.max_memory_allocated() / MIB
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
    return psutil.Process().memory_info().rss / MIB, peak_bytes / MIB


def draw(report: Report, path: Path) -> None:
    """Loss over the steps above; below tensor memory of each rank against that of one process."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (loss_axes, memory_axes) = plt.subplots(
        2, 1, figsize=(8, 7), height_ratios=(3, 2), layout="constrained"
    )
    _draw_loss(report, loss_axes)
    if report.comparison is not None:
        _draw_comparison(report.comparison, memory_axes)
    else:
        _draw_resident(report, memory_axes)
    with replaced(path) as file:
        figure.savefig(file, dpi=120, format=path.suffix[1:])
    plt.close(figure)


def _draw_loss(report: Report, axes: Any) -> None:
    steps, (first, last) = range(1, len(report.losses) + 1), report.ends()
    axes.plot(steps, report.losses, color="tab:blue", linewidth=1, label="training")
    if report.held_out:
        axes.plot(*zip(*report.held_out, strict=True), "o-", color="tab:orange", label="held-out documents")
    axes.axhline(0.6 * first, color="gray", linestyle=":", label="60 % of the start")
    axes.set_title(f"{report.title}\nloss {first:.2f} to {last:.2f}", fontsize=10)
    axes.set_xlabel("step")
    axes.set_ylabel("loss per byte (nats)")
    axes.set_ylim(bottom=0)
    axes.legend()


def _draw_comparison(comparison: Comparison, axes: Any) -> None:
    ranks = comparison.ranks_mib
    names = ["one process", *(f"rank {rank}" for rank in range(len(ranks)))]
    bars = axes.barh(names, [comparison.alone_mib, *ranks], color=["tab:gray"] + ["tab:green"] * len(ranks))
    axes.bar_label(bars, fmt="%.0f MiB", padding=3)
    share = comparison.alone_mib / len(ranks)
    axes.axvline(share, color="black", linestyle="--", linewidth=1, label=f"1/{len(ranks)} of one process")
    axes.set_title(
        f"same weights, same {comparison.samples} x {comparison.tokens} tokens: loss differs by"
        f" {abs(comparison.loss_on_ring - comparison.loss_alone):.1e}, gradients by at most"
        f" {comparison.gradient_difference:.1e}",
        fontsize=10,
    )
    axes.set_xlabel("peak tensor memory of forward + backward (MiB)")
    axes.set_xlim(0, 1.15 * max(comparison.alone_mib, *ranks))
    axes.invert_yaxis()
    axes.legend()


def _draw_resident(report: Report, axes: Any) -> None:
    steps = range(1, len(report.losses) + 1)
    for rank, resident in enumerate(zip(*report.resident_mib, strict=True)):
        axes.plot(steps, resident, linewidth=1.2, label=f"rank {rank} (peak {report.peak_mib[rank]:.0f} MiB)")
    axes.set_ylabel("memory per rank (MiB)")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("step")
    axes.legend()
