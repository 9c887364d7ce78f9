"""Hold the faults of a job: how often each part fails by what is published, and how long until it is known.

Sources:
    Llama 3: "The Llama 3 Herd of Models", arXiv 2407.21783, table 5: 419 unexpected interruptions in 54 days
        on 16,384 H100. The counts are summed by what fails.
    RSC-1: Kokolis et al., "Revisiting Reliability in Large-Scale Machine Learning Research Clusters", HPCA
        2025, arXiv 2410.21680: 6.50 failures in 1,000 node-days of 8 A100; jobs of 1,024 GPUs fail every 7.9
        hours, 3.7 times as often as that rate says.
"""

from __future__ import annotations

from bisect import bisect
from itertools import accumulate
from random import Random
from typing import Literal, NamedTuple

HOUR_S = 3600.0
Part = Literal["GPU", "node", "link", "software"]
Shows = Literal["ends", "silent", "stuck", "false alarm"]


class FaultRate(NamedTuple):
    """Say how often a part fails."""

    part: Part  # links and software are counted by GPU
    mtbf_hours: float  # mean time between faults of one part
    shows: Shows  # how the ranks learn of it: a key of DELAYS_S

    def per_hour(self, gpus: int, gpus_per_node: int) -> float:
        """Return the faults of a job in an hour."""
        parts = -(-gpus // gpus_per_node) if self.part == "node" else gpus
        return parts / self.mtbf_hours


class PublishedRates(NamedTuple):
    """Hold the rates of one source."""

    source: str
    rates: tuple[FaultRate, ...]


_LLAMA_HOURS, _LLAMA_GPUS, _LLAMA_NODES = 54 * 24, 16_384, 2_048
# GPU: faulty GPU 148, HBM3 72, SRAM 19, system processor 17, silent corruption 6, thermal 6.
# Node: maintenance 32, SSD 3, power supply 3, chassis 2, IO board 2, CPU 2, memory 2.
# Link: switch or cable 35, network card 7. Software: bugs 54, dependencies 2, NCCL watchdog 7.
LLAMA_COUNTS: dict[Part, int] = {"GPU": 268, "node": 46, "link": 42, "software": 63}
_SHOWS: dict[Part, Shows] = {"GPU": "ends", "node": "silent", "link": "stuck", "software": "ends"}

_LLAMA_RATES = tuple(
    FaultRate(part, _LLAMA_HOURS * (_LLAMA_NODES if part == "node" else _LLAMA_GPUS) / count, _SHOWS[part])
    for part, count in LLAMA_COUNTS.items()
)
_RSC_NODES = FaultRate("node", 1000 * 24 / 6.50, "silent")
_RSC_JOBS = FaultRate("GPU", 1024 * 7.9, "silent")
RATES = {
    "llama3": PublishedRates("Llama 3, table 5", _LLAMA_RATES),
    "rsc1": PublishedRates("RSC-1, by node", (_RSC_NODES,)),
    "rsc1_jobs": PublishedRates("RSC-1, jobs of 1,024 GPUs", (_RSC_JOBS,)),
}

# Seconds from a fault until the launcher has decided to start again: the least, the most, quantiles between.
# Measured: 1,024 ranks without torch on two cores, the first while these are free, the others beside other
# processes (tools/README.md, "Failures"). A silent rank is found after the JSON's heartbeat_timeout_seconds,
# a link when a hop is over hop_timeout_seconds.
HEARTBEAT_TIMEOUT_S, HOP_TIMEOUT_S = 10.0, 60.0
_ENDS = (2.7, 9.7, 17.3, 18.4)
DELAYS_S: dict[Shows, tuple[float, ...]] = {
    "ends": _ENDS,
    "silent": tuple(HEARTBEAT_TIMEOUT_S + one for one in _ENDS),
    "stuck": tuple(HOP_TIMEOUT_S + one for one in _ENDS),
    "false alarm": (0.0, 0.0),  # nothing has failed until then
}
# Seconds from then until the next step of a small model, without reading a checkpoint of size: two hosts, six
# faults, thirty rounds of `tools/campaign.py relaunch`.
RELAUNCH_S = (13.6, 39.8)


def draw(quantiles: tuple[float, ...], random: Random) -> float:
    """Draw from a distribution that is given by evenly spaced quantiles."""
    place, part = divmod(random.random() * (len(quantiles) - 1), 1)
    low, high = quantiles[int(place) : int(place) + 2]
    return low + (high - low) * part


class Fault(NamedTuple):
    """Hold one fault."""

    after_s: float  # the one before it
    shows: Shows
    part: Part | None  # None: nothing has failed


class FaultProcess:
    """Draw the faults of a job one after the other, each part's with exponential times between them.

    Args:
        rates: of its parts.
        gpus, gpus_per_node: of the job.
        random: the source of all draws.
        false_alarm_hours: mean time between two false alarms of the job; None: none.
    """

    def __init__(
        self, rates: tuple[FaultRate, ...], gpus: int, gpus_per_node: int, random: Random,
        false_alarm_hours: float | None = None,
    ) -> None:  # fmt: skip
        kinds: list[tuple[Shows, Part | None]] = [(rate.shows, rate.part) for rate in rates]
        per_hour = [rate.per_hour(gpus, gpus_per_node) for rate in rates]
        if false_alarm_hours is not None:
            kinds.append(("false alarm", None))
            per_hour.append(1 / false_alarm_hours)
        self._kinds, self._random = kinds, random
        self._until = list(accumulate(rate / sum(per_hour) for rate in per_hour))
        self.mtbf_s = HOUR_S / sum(per_hour)

    def next(self) -> Fault:
        """Return the next fault."""
        after_s = self._random.expovariate(1 / self.mtbf_s)
        shows, part = self._kinds[bisect(self._until[:-1], self._random.random())]
        return Fault(after_s, shows, part)
