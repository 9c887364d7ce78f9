"""Simulate what others have published of training with faults, from what they publish of it.

Sources:
    TorchPass: clockwork.io/blog/keeping-distributed-training-running-through-failures: TorchTitan, Llama 4
        Scout (109 billion parameters) on 64 H200; 3,000 steps, a checkpoint every 100, a fault every 2,700 to
        4,500 s; 405 minutes with TorchPass, 818 with restarts from checkpoints, 930 with torchft. A restart
        takes 15 minutes by clockwork.io/workload-failover. Not known here: the time of a step, and how a
        fault was noticed.
    ByteRobust: arXiv 2509.16293: 97 % of three months on 9,600 GPUs, a dense model; 91 % of a month, experts.
        It saves at every step, which blocks 0.01 to 0.04 s.
    Llama 3: arXiv 2407.21783: more than 90 % of 54 days on 16,384 H100.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random
from statistics import fmean
from typing import NamedTuple

from .faults import Fault
from .simulation import Job, simulate

MINUTE_S = 60.0
STEPS, STEPS_BETWEEN_SAVES = 3_000, 100
FAULTS_S = (2_700.0, 4_500.0)
TORCHPASS_MINUTES, RESTART_MINUTES, TORCHFT_MINUTES = 405.0, 818.0, 930.0
TORCHPASS_PARAMETERS, TORCHPASS_GPUS = 109_000_000_000, 64
RESTART_S = 15 * MINUTE_S
# torch's default time limit of NCCL's collectives, which ends a job whose rank is gone without a word.
NCCL_TIMEOUT_S = 10 * MINUTE_S
STEP_S = TORCHPASS_MINUTES * MINUTE_S / STEPS  # at most: the run with the fewest losses
REPEATS = 200


class PublishedShare(NamedTuple):
    """Hold a share of useful time that was published."""

    name: str
    gpus: int
    useful: float


SHARES = (
    PublishedShare("ByteRobust, dense", 9_600, 0.97),
    PublishedShare("ByteRobust, experts", 9_600, 0.91),
    PublishedShare("Llama 3, at least", 16_384, 0.90),
)


def injected(random: Random) -> Callable[[], Fault]:
    """Return the faults of TorchPass's schedule: a process ends, 45 to 75 minutes after the one before."""
    return lambda: Fault(random.uniform(*FAULTS_S), "ends", "GPU")


def minutes(job: Job, seed: int = 0) -> float:
    """Return how long the 3,000 steps take, the mean of many runs."""
    random = Random(seed)
    runs = [simulate(job, injected(random), work_s=STEPS * STEP_S).wall_s for _ in range(REPEATS)]
    return fmean(runs) / MINUTE_S


def restarts(detection_s: float) -> float:
    """Return the minutes of the run that restarts from checkpoints, if a fault is noticed after so long."""
    job = Job(
        STEPS_BETWEEN_SAVES * STEP_S, 0.0, 0.0, lambda fault: detection_s, lambda fault: RESTART_S
    )  # pauses are in the steps' time
    return minutes(job)


def minutes_a_fault(useful: float, mtbf_s: float) -> float:
    """Return what a job may lose at each fault for this share, if saving costs nothing."""
    return -mtbf_s * math.log(useful) / MINUTE_S
