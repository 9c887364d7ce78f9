"""The record of a training run: its rows as JSON and a picture of loss and memory."""

from __future__ import annotations

import json
import resource
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from ds_ring.written_files import replace_text

from ..plan.picture import new_figure, save_figure
from .lm_compare import Comparison

MIB = 2**20
LAST_STEPS = 10  # of which the training loss at the end is the mean


@dataclass
class Report:
    """Hold one run, row by row."""

    title: str  # model, sizes and ring, in one line
    losses: list[float] = field(default_factory=list)  # mean over the step's tokens, before the step
    held_out: list[tuple[int, float]] = field(default_factory=list)  # (step, mean loss on other documents)
    tokens_per_second: list[float] = field(default_factory=list)  # of the whole world
    peak_mib: list[float] = field(default_factory=list)  # by rank
    comparison: Comparison | None = None  # the ring against one process, at the end

    def restore(self, state: dict[str, Any]) -> None:
        """Continue the rows of the run that wrote a checkpoint."""
        for key in ("losses", "held_out", "tokens_per_second"):
            setattr(self, key, list(state[key]))

    @property
    def training_loss(self) -> tuple[float, float]:
        """Return the loss of the first step, and the mean of the last ones."""
        return self.losses[0], statistics.mean(self.losses[-LAST_STEPS:])

    def summary(self) -> str:
        """Return the run in one line, and the figures of the comparison below it."""
        first, last = self.training_loss
        held_out = f", held out {self.held_out[-1][1]:.3f}" if self.held_out else ""
        peaks = " ".join(f"{peak:.0f}" for peak in self.peak_mib)
        compared = self.comparison.rows() if self.comparison else {}
        return (
            f"training loss {first:.3f} in step 1, {last:.3f} on average of the last"
            f" {min(len(self.losses), LAST_STEPS)} steps{held_out};"
            f" {statistics.median(self.tokens_per_second):.0f} tokens/s; peak memory per rank {peaks} MiB"
            + "".join(f"\n{name}: {value}" for name, value in compared.items())
        )

    def write(self, folder: Path) -> None:
        """Write log.json and training.png."""
        folder.mkdir(parents=True, exist_ok=True)
        replace_text(folder / "log.json", json.dumps(asdict(self), indent=1) + "\n")
        draw(self, folder / "training.png")


def peak_memory_mib() -> float:
    """Return the peak memory of this process; on CUDA that of its tensors."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / MIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / MIB  # Linux counts in KiB


def draw(report: Report, path: Path) -> None:
    """Draw the loss, and below it the peak memory of each rank, against one process if they were compared."""
    figure = new_figure(8, 7)
    loss_axes, memory_axes = figure.subplots(2, 1, height_ratios=(3, 2))
    loss_axes.plot(range(1, len(report.losses) + 1), report.losses, label="training")
    if report.held_out:
        loss_axes.plot(*zip(*report.held_out, strict=True), "o-", label="held-out documents")
    loss_axes.set(title=report.title, xlabel="step", ylabel="loss per byte, nats", ylim=(0, None))
    loss_axes.grid(alpha=0.3)
    loss_axes.legend()
    comparison = report.comparison
    alone, sizes = (
        ([], report.peak_mib) if comparison is None else ([comparison.alone_mib], comparison.ranks_mib)
    )
    names = [*(["one process"] if alone else []), *(f"rank {rank}" for rank in range(len(sizes)))]
    memory_axes.bar_label(memory_axes.barh(names, [*alone, *sizes]), fmt="%.0f MiB", padding=3)
    memory_axes.set_title(
        "peak memory" if comparison is None else "peak tensor memory of a pass", fontsize=10
    )
    memory_axes.margins(x=0.15)  # space for the labels
    memory_axes.set_xlabel("MiB")
    memory_axes.invert_yaxis()
    save_figure(figure, path)
