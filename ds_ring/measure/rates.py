"""Measured rates of kernels, by device and kind of tile.

They are in `rates.json` in this folder, in TFLOP/s of attended pairs: {device: {kind: {kernel: [forward,
backward]}}}. `tools/gpu_first.py` writes such a file on a machine with the device; copy it here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch

RATES = Path(__file__).with_name("rates.json")
# A pair's share of the FLOPs of both passes: two matrix products forward, five backward.
FORWARD, BACKWARD = 4.0, 10.0

RatesByTile = Mapping[str, Mapping[str, tuple[float, float]]]


class Fastest(NamedTuple):
    """Hold a kernel, and why it was taken."""

    kernel: str
    why: str


def rates_here() -> RatesByTile:
    """Return the measured rates of the current GPU, by kind of tile and kernel; empty without any."""
    return _all_rates(RATES).get(torch.cuda.get_device_name(), {}) if torch.cuda.is_available() else {}


def fastest_here(kind: str, able: Iterable[str]) -> Fastest | None:
    """Return the fastest kernel on the current GPU; see `fastest`."""
    return fastest(rates_here(), kind, able)


@lru_cache(maxsize=1)
def _all_rates(path: Path) -> dict[str, RatesByTile]:
    rates: dict[str, RatesByTile] = json.loads(path.read_text()) if path.is_file() else {}
    return rates


def fastest(rates: RatesByTile, kind: str, able: Iterable[str]) -> Fastest | None:
    """Return the kernel that takes the least time for both passes of a pair; None without two to compare.

    Args:
        rates: of a device.
        kind: `Pattern.tile_kind`.
        able: names of the kernels that can compute it.
    """
    measured = rates.get(kind, {})
    seconds = {
        name: FORWARD / measured[name][0] + BACKWARD / measured[name][1] for name in able if name in measured
    }
    if len(seconds) < 2:
        return None
    first, second, *_ = sorted(seconds, key=lambda name: seconds[name])
    return Fastest(
        first, f"{seconds[second] / seconds[first]:.2f} times as fast as {second!r} on {kind} tiles, measured"
    )
