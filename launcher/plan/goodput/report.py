"""Print what `ds-ring plan --goodput` found, as tables for people and as JSON for machines."""

from __future__ import annotations

from random import Random
from typing import Any, NamedTuple

from rich.table import Table

from ...tables import print_table
from ..estimate import Estimate
from ..training_setting import TrainingSetting
from .faults import HOUR_S, RATES
from .jobs import GoodputOptions, GoodputRow, goodput_row, job_of, saving_cost
from .schedules import (
    FAULTS_S,
    MINUTE_S,
    NCCL_TIMEOUT_S,
    RESTART_MINUTES,
    SHARES,
    TORCHFT_MINUTES,
    TORCHPASS_GPUS,
    TORCHPASS_MINUTES,
    TORCHPASS_PARAMETERS,
    minutes,
    minutes_a_fault,
    restarts,
)  # fmt: skip

GPUS = (8, 64, 1024)


class ScheduleRow(NamedTuple):
    """Hold the minutes of 3,000 steps with faults."""

    what: str
    published: float | None
    simulated: float | None


class ShareRow(NamedTuple):
    """Hold a published share of useful time, and the planned model's on as many GPUs."""

    name: str
    gpus: int
    published: float
    minutes_a_fault: float  # that the published share leaves, at the simulation's rate of faults
    simulated: float


class Goodput(NamedTuple):
    """Hold all rows."""

    days: int
    step_s: float  # of the plan, on its devices
    devices: int
    rows: list[GoodputRow]
    others: list[GoodputRow]  # the same GPUs by other rates
    schedule: list[ScheduleRow]
    shares: list[ShareRow]


def goodput(found: Estimate, options: GoodputOptions) -> Goodput:
    """Simulate the plan's model on 8, 64, 1,024 GPUs and on its own number, and what others published."""
    setting = found.setting
    counts = sorted({*GPUS, setting.devices})
    rows = [goodput_row(setting, gpus, options) for gpus in counts]
    rates = [one for one in RATES if one != rows[0].rates]
    others = [goodput_row(setting, gpus, options, one) for one in rates for gpus in counts]
    shares, large = [], {gpus: goodput_row(setting, gpus, options) for gpus in {one.gpus for one in SHARES}}
    for one in SHARES:
        row = large[one.gpus]
        left = minutes_a_fault(one.useful, row.fault_hours * HOUR_S)
        shares.append(ShareRow(one.name, one.gpus, one.useful, left, row.useful))
    return Goodput(
        options.days, found.step_s, setting.devices, rows, others, _schedule(setting, options), shares
    )


def _schedule(setting: TrainingSetting, options: GoodputOptions) -> list[ScheduleRow]:
    cost = saving_cost(setting, TORCHPASS_PARAMETERS, TORCHPASS_GPUS, options)
    spare = options.model_copy(update={"replacement_seconds": 0.0})
    waits, goes_on = (minutes(job_of(cost, sum(FAULTS_S) / 2, one, Random(0))) for one in (options, spare))
    return [
        ScheduleRow("restarts, faults known after 10 minutes", RESTART_MINUTES, restarts(NCCL_TIMEOUT_S)),
        ScheduleRow("restarts, faults known at once", None, restarts(0.0)),
        ScheduleRow("TorchPass (a step's time is from it)", TORCHPASS_MINUTES, None),
        ScheduleRow("torchft (its steps are slower)", TORCHFT_MINUTES, None),
        ScheduleRow("ds_ring, waits for a new node", None, waits),
        ScheduleRow("ds_ring, a spare node is ready", None, goes_on),
    ]


def as_dict(found: Goodput) -> dict[str, Any]:
    """Return everything that the tables have, in full precision."""
    return {
        "days": found.days,
        "save_every_steps": {one.gpus: _steps(found, one) for one in found.rows if one.gpus == found.devices},
        "rows": [one._asdict() for one in found.rows],
        "other_rates": [one._asdict() for one in found.others],
        "schedule_minutes": [one._asdict() for one in found.schedule],
        "published_shares": [one._asdict() for one in found.shares],
    }


def _steps(found: Goodput, row: GoodputRow) -> int:
    return max(round(row.interval_s / found.step_s), 1)


def print_goodput(found: Goodput) -> None:
    """Print the tables on stdout."""
    source = RATES[found.rows[0].rates].source if found.rows[0].rates in RATES else "the given MTBF"
    headers = ("GPUs", "a fault each", "save each", "useful", "saves", "lost", "noticed", "restarts")
    table = Table(*headers, title=f"{found.days} days of faults by {source}", title_justify="left")
    for row in found.rows:
        shares = (row.useful, row.saving, row.lost, row.detection, row.restart)
        steps = f", {_steps(found, row):,} steps" if row.gpus == found.devices else ""
        save = f"{row.interval_s / MINUTE_S:.1f} min{steps}"
        table.add_row(f"{row.gpus:,}", f"{row.fault_hours:,.1f} h", save, *(f"{one:.2%}" for one in shares))
    print_table(table)
    if found.others:
        counts = [row.gpus for row in found.rows]
        table = Table("useful time by other rates", *(f"{one:,} GPUs" for one in counts))
        for rates in dict.fromkeys(row.rates for row in found.others):
            mine = [f"{row.useful:.2%}" for row in found.others if row.rates == rates]
            table.add_row(RATES[rates].source, *mine)
        print_table(table)
    table = Table("3,000 steps, 64 GPUs, faults injected", "published min", "simulated min")
    for what, *figures in found.schedule:
        table.add_row(what, *("" if one is None else f"{one:,.0f}" for one in figures))
    print_table(table)
    table = Table("useful time", "GPUs", "published", "min a fault", "this model")
    for name, gpus, published, left, simulated in found.shares:
        table.add_row(name, f"{gpus:,}", f"{published:.0%}", f"{left:.1f}", f"{simulated:.1%}")
    print_table(table)
