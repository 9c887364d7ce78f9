"""Compute the model's figure beside every published one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from .methods import METHODS, Pass
from .packs import get_packs
from .steps import longest_tokens, torch_step, ulysses_tflops
from .table import Direction, PassGroup, Table

CLOSE = 0.1  # a figure holds that is so close to the published one
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward", "both")


class Result(NamedTuple):
    """Hold a published figure and the model's."""

    source: str
    date: str
    method: str
    setting: str  # hardware, mask or model
    devices: int
    quantity: str
    published: float
    model: float
    why: str | None  # what explains a figure that is off

    @property
    def ratio(self) -> float:
        """Return the model's figure over the published one."""
        return self.model / self.published

    @property
    def holds(self) -> bool:
        """Return whether the model's figure is close."""
        return abs(self.ratio - 1) <= CLOSE


def share(results: Iterable[Result]) -> float:
    """Return the part of the figures that hold."""
    held = [result.holds for result in results]
    return sum(held) / len(held) if held else 0.0


def evaluate(table: Table) -> list[Result]:
    """Return all figures of the table, in its order."""
    return [*_passes(table), *_steps(table), *_lengths(table)]


def _passes(table: Table) -> Iterator[Result]:
    for group in table.passes:
        source, date = group.source, str(table.sources[group.source].date)
        for direction in DIRECTIONS:
            for ranks, published in getattr(group, direction).items():
                model = pass_tflops(table, group, direction, ranks)
                setting = f"{group.machine} {group.mask} {group.kernel}"
                quantity = f"{direction}, TFLOPS a GPU"
                yield Result(
                    source, date, group.method, setting, ranks, quantity, published, model, group.why
                )


def list_passes(table: Table, group: PassGroup, direction: Direction, ranks: int) -> Iterator[Pass]:
    """Yield the pass of a group's figure, for each pack where documents are packed."""
    tokens = ranks * group.tokens
    machine, kernel = table.machines[group.machine], table.kernels[group.kernel]
    for lengths in get_packs(tokens) if group.mask == "packed" else ((tokens,),):
        yield Pass(machine, kernel, ranks, group.tokens, group.heads, group.kv_heads, direction, lengths)


def pass_tflops(table: Table, group: PassGroup, direction: Direction, ranks: int) -> float:
    """Return the TFLOPS a device of a pass; of packs the mean, as the benchmark takes it."""
    rates = [
        attention.flops / METHODS[group.method](attention) / 1e12
        for attention in list_passes(table, group, direction, ranks)
    ]
    return sum(rates) / len(rates)


def _steps(table: Table) -> Iterator[Result]:
    for row in table.steps:
        date, setting = str(table.sources[row.source].date), f"{row.model}, {row.tokens:,} tokens"
        at = (row.source, date, row.method, setting, row.devices)
        if row.tflops is not None:
            yield Result(*at, "step, TFLOPS a GPU", row.tflops, ulysses_tflops(table, row), row.why)
            continue
        step = torch_step(table, row)
        if row.seconds is not None:
            yield Result(*at, "step, seconds", row.seconds, step.seconds, row.why)
        if row.gigabytes is not None:
            yield Result(*at, "peak, GB", row.gigabytes, step.gigabytes, row.why)


def _lengths(table: Table) -> Iterator[Result]:
    for row in table.lengths:
        modelled = longest_tokens(table, row)
        at = (row.source, str(table.sources[row.source].date), row.method, row.model, row.devices)
        yield Result(*at, "longest sequence, tokens", row.tokens, modelled, row.why)
