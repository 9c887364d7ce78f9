"""The numbers that bound what a caller or the JSON may give, and how long ranks wait for each other.

Each limit is defined here once. Owns numbers; the code that reads a value checks it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

MAX_TOKENS = 1 << 53  # positions, their products with small numbers, and their differences fit into int64
MAX_RANKS = 1 << 20
MAX_HEADS = 1 << 16
MAX_BYTES = 1 << 53  # of an option: a float's whole numbers
MAX_BLOCK = 1 << 31  # tokens on a side of a mask block
ABORT_S = 30.0  # until process groups that are blocked are aborted, all together
MAX_SECONDS = 1e8  # three years: what timers, sockets and timedelta take


class Limit(NamedTuple):
    """A time limit in seconds, and the key of the JSON that sets it."""

    seconds: float
    key: str


class Timeouts(NamedTuple):
    """Seconds that ranks wait for each other; each is the key NAME_timeout_seconds of the JSON.

    Attributes:
        hop: for a message of a pass, and for a rank that is inside forward, backward or step of the engine.
        step: for a rank that is outside of these: in its data set, an evaluation, or the training script.
        checkpoint: for a rank that saves or loads a checkpoint.
        start: until every rank has come to where ds_ring starts, and the engine is made.
    """

    hop: float = 60.0
    step: float = 600.0
    checkpoint: float = 1800.0
    start: float = 1800.0

    def limit(self, name: str) -> Limit:
        """Return one of them with its key."""
        return Limit(getattr(self, name), f"{name}_timeout_seconds")


def divisors(number: int) -> list[int]:
    """Return divisors in rising order, by pairs up to the square root: a typing error must not hang."""
    small = [n for n in range(1, min(math.isqrt(number), 10**6) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})
