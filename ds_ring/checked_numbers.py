"""Whole numbers that a caller gave: Python's and numpy's alike, and nothing that merely looks like one."""

from __future__ import annotations

import operator

import numpy as np

from ds_ring.errors import RingError, shown

MOST_TOKENS = 1 << 53  # positions, their products with small numbers, and their differences fit into int64
MOST_RANKS = 1 << 20
MOST_HEADS = 1 << 16


def whole_number(value: object, what: str, error: type[RingError], most: int = MOST_TOKENS) -> int:
    """Return the value as an int from 1 to `most`; raise `error`, which names it as `what`, for another."""
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
        number = operator.index(value)
        if 1 <= number <= most:
            return number
        if number > most:
            raise error(f"{what}: expected a positive integer of at most {most}, got {shown(value)}")
    raise error(f"{what}: expected a positive integer, got {shown(value)}; pass an int, 1 or more")


def true_or_false(value: object, what: str, error: type[RingError]) -> bool:
    """Return the value if it is a bool; raise `error`, which names it as `what`, for anything else."""
    if not isinstance(value, bool):
        raise error(f"{what}: expected True or False, got {shown(value)}")
    return value
