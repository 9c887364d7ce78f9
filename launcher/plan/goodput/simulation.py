"""Simulate one job from fault to fault: what is saved, lost, waited for.

Between two faults a job computes for an interval, stands for the pause of a save, computes on while the save
is written, and so on. At a fault it goes back to the newest checkpoint that is written. A fault while the job
starts again makes it start anew. Time between two faults is computed, not stepped through.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields

from .faults import Fault

MAX_FAULTS = 1_000_000  # a job that does not get on is cut off


@dataclass(frozen=True)
class Job:
    """Describe how a job saves, and how long it stands after a fault."""

    interval_s: float  # of work between two saves
    pause_s: float  # of all ranks in a save
    write_s: float  # from then until a fault finds the checkpoint whole
    detection_s: Callable[[Fault], float]
    restart_s: Callable[[Fault], float]  # from then until the first step


@dataclass
class Ledger:
    """Account for every second of a job."""

    useful_s: float = 0.0  # work that was done once and stayed
    saving_s: float = 0.0
    lost_s: float = 0.0  # work that was done again later
    detection_s: float = 0.0
    restart_s: float = 0.0
    faults: int = 0
    false_alarms: int = 0

    @property
    def wall_s(self) -> float:
        """Return the sum of all."""
        return self.useful_s + self.saving_s + self.lost_s + self.detection_s + self.restart_s

    @property
    def useful(self) -> float:
        """Return the share of useful time."""
        return self.useful_s / self.wall_s

    def __add__(self, other: Ledger) -> Ledger:
        return Ledger(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(Ledger)))


def simulate(
    job: Job, next_fault: Callable[[], Fault], *, work_s: float = math.inf, wall_s: float = math.inf
) -> Ledger:
    """Return the account of a job that ends with its work done, or after so much time.

    Args:
        job: how it saves and starts again.
        next_fault: the next one at each call.
        work_s: work that is to be done.
        wall_s: time that it may take.
    """
    ledger, now = Ledger(), 0.0
    fault = next_fault()
    strikes = fault.after_s
    while now < wall_s and ledger.useful_s < work_s and ledger.faults < MAX_FAULTS:
        left = work_s - ledger.useful_s
        run_s = min(strikes, wall_s) - now
        if math.isfinite(left) and _seconds(job, left) <= run_s:
            ledger.useful_s += left
            ledger.saving_s += _seconds(job, left) - left
            break
        work, written = _progress(job, run_s)
        ledger.saving_s += run_s - work
        if strikes >= wall_s:
            ledger.useful_s += work  # nothing has gone wrong so far
            break
        ledger.useful_s += written
        ledger.lost_s += work - written
        now = strikes
        while True:  # down: the next fault may come before the first step
            ledger.faults += fault.part is not None
            ledger.false_alarms += fault.part is None
            known = now + job.detection_s(fault)
            up = known + job.restart_s(fault)
            fault = next_fault()
            strikes = now + fault.after_s
            ends = min(up, strikes, wall_s)
            ledger.detection_s += min(known, ends) - now
            ledger.restart_s += max(ends - known, 0.0)
            now = ends
            if ends != strikes or strikes >= wall_s or ledger.faults >= MAX_FAULTS:
                break
    return ledger


def _progress(job: Job, run_s: float) -> tuple[float, float]:
    """Return the work of a run of so many seconds, and the part of it in written checkpoints."""
    cycle = job.interval_s + job.pause_s
    whole, rest = divmod(run_s, cycle)
    written = max((run_s - job.write_s) // cycle, 0.0) * job.interval_s
    return whole * job.interval_s + min(rest, job.interval_s), written


def _seconds(job: Job, work_s: float) -> float:
    """Return the time of so much work without a fault; no save after the end."""
    return work_s + job.pause_s * max(math.ceil(work_s / job.interval_s) - 1, 0)
