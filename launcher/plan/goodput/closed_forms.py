"""Compute the best interval and the expected share of useful time, for faults that come at a constant rate.

Sources:
    Young, "A First Order Approximation to the Optimum Checkpoint Interval", CACM 17 (1974).
    Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future Generation
        Computer Systems 22 (2006), equations 20 and 37.
    Kokolis et al., HPCA 2025 (arXiv 2410.21680): their expected effective training time ratio.

All times are seconds; `mtbf` is that of the whole job.
"""

from __future__ import annotations

import math


def young(pause: float, mtbf: float) -> float:
    """Return Young's interval of work between two saves."""
    return math.sqrt(2 * pause * mtbf)


def daly(pause: float, mtbf: float) -> float:
    """Return Daly's interval, which holds for long pauses, too."""
    if pause >= 2 * mtbf:
        return mtbf
    part = math.sqrt(pause / (2 * mtbf))
    return math.sqrt(2 * pause * mtbf) * (1 + part / 3 + part * part / 9) - pause


def useful_share(interval: float, pause: float, mtbf: float, restart: float, write: float = 0.0) -> float:
    """Return Daly's expected share of useful time.

    Args:
        interval: of work between two saves.
        pause: of a save.
        mtbf: mean time between faults.
        restart: from a fault to the next step; a fault in it makes it begin anew.
        write: after a pause, until the checkpoint counts. A fault goes back by so much more, by the same
            exponential law, so the share is exp(-write / mtbf) times that of a save at once.
    """
    cycles = math.expm1((interval + pause) / mtbf)
    return interval * math.exp(-(write + restart) / mtbf) / (mtbf * cycles)


def kokolis_share(interval: float, pause: float, mtbf: float, restart: float) -> float:
    """Return the share by Kokolis et al., for losses that are small and do not meet."""
    return (1 - (restart + interval / 2) / mtbf) / (1 + pause / interval)
