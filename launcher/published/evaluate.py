"""Compute the model's figure beside every published one, and ds_ring's where the peers' rows hold."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from ..plan.estimate import estimate
from ..plan.hardware import read_hardware
from .methods import METHODS, Pass
from .own import compute_own_pass
from .packs import get_packs
from .steps import longest_tokens, make_published_setting, torch_step, ulysses_tflops
from .table import Direction, PassGroup, Table

CLOSE = 0.1  # a figure holds that is so close to the published one
HOLDS = 0.8  # of a setting's peers so many figures must hold before ours is said
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


class Prediction(NamedTuple):
    """Hold ds_ring's modelled figure in a setting whose peers' rows hold."""

    setting: str
    devices: int
    quantity: str
    model: float
    best_published: str  # by a peer, and whose
    peers: float  # the part of their figures that hold


def predict(table: Table, results: list[Result]) -> list[Prediction]:
    """Return ds_ring's figures: of attention's causal passes on H100, and of TRL's steps.

    packed.py has those of packed documents.
    """
    setting, predictions = "h100 causal", []
    peers = [row for row in results if row.setting.startswith(setting) and row.method != "kernel alone"]
    if share(peers) >= HOLDS:
        group = next(
            row for row in table.passes if f"{row.machine} {row.mask} {row.kernel}" == f"{setting} flash3"
        )
        for ranks in group.forward:
            (attention,) = list_passes(table, group, "forward", ranks)
            times = zip(("forward", "backward"), (1, 2.5), compute_own_pass(attention).seconds, strict=True)
            for direction, factor, seconds in times:
                quantity = f"{direction}, TFLOPS a GPU"
                rows = (row for row in peers if (row.devices, row.quantity) == (ranks, quantity))
                peer = max(rows, key=lambda row: row.published)
                best = f"{peer.published:,.0f} ({peer.method})"
                rate = factor * attention.flops / seconds / 1e12
                predictions.append(Prediction(setting, ranks, quantity, rate, best, share(peers)))
    held = share(result for result in results if result.quantity == "step, seconds")
    # of two figures for one setting the later one
    latest = {(row.model, row.tokens, row.devices): row for row in table.steps if row.seconds is not None}
    for row in latest.values() if held >= HOLDS else ():
        step = estimate(replace(make_published_setting(table, row), hardware=read_hardware("h100_flash3")))
        name, best = f"{row.model}, {row.tokens:,} tokens", f"{row.seconds:,.0f} ({row.method})"
        seconds = step.step_s - step.host_s
        predictions.append(Prediction(name, row.devices, "step, seconds", seconds, best, held))
    return predictions
