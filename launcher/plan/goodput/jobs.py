"""Simulate the planned model on so many GPUs, with the interval that is best there.

Owns the keys of the option's JSON. What is not known is assumed, and a key says otherwise. A host that fails
comes back, or another one in its place, before the ranks start again; the job waits for it.
"""

from __future__ import annotations

import math
from random import Random
from statistics import fmean
from typing import Annotated, Literal, NamedTuple

from pydantic import Field, ValidationError

from ds_ring.config.json_text import parse_object
from ds_ring.config.messages import WORD, Accepted, Section, config_error, problems_of

from ..training_setting import ELEMENT_BYTES, TrainingSetting
from .closed_forms import daly, useful_share
from .faults import DELAYS_S, HOUR_S, RATES, RELAUNCH_S, Fault, FaultProcess, draw
from .simulation import Job, Ledger, simulate

REPEATS = 40
DAY_S = 24 * HOUR_S
FLOAT = 4
# Of a node's share of the storage: Llama 3's file system sustains 2 TB/s for 24,000 GPUs in 3,000 nodes.
STORAGE_BYTES_PER_S = 2e12 / 3_000
FIXED_PAUSE_S = 1.0  # of a save, besides copying: to agree, to list the states (assumed)

Seconds = Annotated[
    float,
    Field(ge=0, le=1e6, allow_inf_nan=False),
    Accepted("a number of seconds, 0 or more and at most 1e+06", "write 60, say"),
]
SecondsOrNone = Annotated[
    Seconds | None,
    Accepted("a number of seconds, 0 or more and at most 1e+06, or null", "write 60, say, or leave it out"),
]
HoursOrNone = Annotated[
    Annotated[float, Field(ge=1e-2, le=1e9, allow_inf_nan=False)] | None,
    Accepted("a number of hours of at least 0.01, or null", "write 720, say, or leave it out"),
]


class GoodputOptions(Section):
    """The option's JSON."""

    rates: Annotated[Literal["llama3", "rsc1", "rsc1_jobs"], WORD] = "llama3"
    gpu_mtbf_hours: HoursOrNone = None  # of a GPU, all causes; instead of `rates`
    false_alarm_hours: HoursOrNone = None  # of the job; none was seen (tools/README.md)
    pause_seconds: SecondsOrNone = None  # of a save, for all; default: the copy to the host
    write_seconds: SecondsOrNone = None  # after it; default: the states at STORAGE_BYTES_PER_S a node
    start_seconds: Seconds = 60.0  # assumed: imports, devices, groups, compiling
    replacement_seconds: Seconds = 600.0  # of a node or GPU, as clockwork.io assumes
    days: Annotated[
        int, Field(ge=1, le=3650), Accepted("a whole number of days of at least 1", "write 90, say")
    ] = 90


def options_from(text: str) -> GoodputOptions:
    """Return the options of a JSON object; RingConfigError for anything else."""
    try:
        return GoodputOptions.model_validate(parse_object(text, "--goodput"))
    except ValidationError as error:
        raise config_error("--goodput", *problems_of(error, GoodputOptions, "")) from None


class SavingCost(NamedTuple):
    """Hold what a save costs, in seconds; reading takes as long as writing."""

    pause_s: float
    write_s: float


def saving_cost(setting: TrainingSetting, parameters: int, gpus: int, options: GoodputOptions) -> SavingCost:
    """Return the cost of saving weights, float32 weights and Adam's moments in the background.

    All ranks copy their part to the host, then training goes on. Without a link in the hardware's file all
    wait for the writing.
    """
    hardware, element = setting.hardware, ELEMENT_BYTES[setting.dtype]
    weights = parameters * element
    optimizer = parameters * FLOAT * (2 if element == FLOAT else 3)
    shared = gpus if setting.zero.stage else 1
    own = (weights / gpus if setting.zero.stage == 3 else weights) + optimizer / shared
    writing_nodes = -(-gpus // hardware.devices_per_node) if setting.zero.stage else 1
    write_s = (weights + optimizer) / (writing_nodes * STORAGE_BYTES_PER_S)
    if hardware.host_link_bytes_per_s is None:
        pause_s, write_s = write_s, 0.0
    else:
        pause_s = FIXED_PAUSE_S + own / hardware.host_link_bytes_per_s
    given = (options.pause_seconds, options.write_seconds)
    return SavingCost(
        *(new if new is not None else old for new, old in zip(given, (pause_s, write_s), strict=True))
    )


class GoodputRow(NamedTuple):
    """Hold what became of a job of so many GPUs; shares are of all time."""

    gpus: int
    rates: str
    fault_hours: float  # mean time between two
    interval_s: float  # of work between two saves
    useful: float
    saving: float
    lost: float
    detection: float
    restart: float
    faults: int  # in all repeats
    expected: float  # the useful share by the closed form


def goodput_row(
    setting: TrainingSetting, gpus: int, options: GoodputOptions, rates: str | None = None
) -> GoodputRow:
    """Simulate a job of so many GPUs with the interval that is best for it."""
    random = Random(gpus)
    cost = saving_cost(setting, setting.model.parameters, gpus, options)
    rates = rates or ("gpu_mtbf_hours" if options.gpu_mtbf_hours else options.rates)
    process = fault_process(setting, gpus, options, rates, random)
    job = job_of(cost, process.mtbf_s, options, random)
    ledger = sum((simulate(job, process.next, wall_s=options.days * DAY_S) for _ in range(REPEATS)), Ledger())
    wall_s = ledger.wall_s
    down = [fault_down_s(job, process.next()) for _ in range(2000)]
    # A drawn time from fault to step counts by the chance that no other fault comes in it.
    mtbf_s = process.mtbf_s
    restart_s = -mtbf_s * math.log(fmean(math.exp(-one / mtbf_s) for one in down))
    return GoodputRow(
        gpus, rates, mtbf_s / HOUR_S, job.interval_s, ledger.useful, ledger.saving_s / wall_s,
        ledger.lost_s / wall_s, ledger.detection_s / wall_s, ledger.restart_s / wall_s, ledger.faults,
        useful_share(job.interval_s, job.pause_s, mtbf_s, restart_s, job.write_s),
    )  # fmt: skip


def fault_down_s(job: Job, fault: Fault) -> float:
    """Draw the time from a fault to the next step."""
    return job.detection_s(fault) + job.restart_s(fault)


def fault_process(
    setting: TrainingSetting, gpus: int, options: GoodputOptions, rates: str, random: Random
) -> FaultProcess:
    """Return the faults of a job of so many GPUs."""
    known = RATES["llama3"].rates
    if rates == "gpu_mtbf_hours":  # parts in the proportion of Llama 3's
        per_gpu_hour = sum(rate.per_hour(8, 8) for rate in known) / 8
        factor = options.gpu_mtbf_hours * per_gpu_hour  # type: ignore[operator]
        known = tuple(rate._replace(mtbf_hours=rate.mtbf_hours * factor) for rate in known)
    else:
        known = RATES[rates].rates
    return FaultProcess(known, gpus, setting.hardware.devices_per_node, random, options.false_alarm_hours)


def job_of(cost: SavingCost, mtbf_s: float, options: GoodputOptions, random: Random) -> Job:
    """Return the job with the best interval: Daly's, but no save before the one before is written."""

    def restart_s(fault: Fault) -> float:
        waits = options.replacement_seconds if fault.part in ("GPU", "node") else 0.0
        return (
            waits + draw(RELAUNCH_S, random) + options.start_seconds + cost.write_s
        )  # reading takes as long

    interval_s = max(daly(cost.pause_s, mtbf_s), cost.write_s, 1.0)
    return Job(interval_s, *cost, lambda fault: draw(DELAYS_S[fault.shows], random), restart_s)
