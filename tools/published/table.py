"""Read the published measurements of rows.yaml: the only file that knows its keys."""

from __future__ import annotations

import math
from datetime import date
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np
import yaml
from pydantic import Field

from ds_ring.config.messages import Section

ROWS = Path(__file__).with_name("rows.yaml")

Direction = Literal["forward", "backward", "both"]
Curve = dict[int, float]  # TFLOP/s by length of the sequence


def rate_at(curve: Curve, length: float) -> float:
    """Return FLOP/s at a length: linear in its logarithm between the published ones, constant outside."""
    known = sorted(curve)
    return 1e12 * float(np.interp(math.log(length), np.log(known), [curve[n] for n in known]))


class Source(Section):
    """Say who measured something, when, and where it can be read."""

    what: str = Field(min_length=1)
    date: date
    link: str = Field(pattern="^https://")


class Machine(Section):
    """Describe the links and memory of a kind of device, bytes a second as others measured them."""

    node: int
    link: float
    network: float
    memory: float
    sources: list[str]


class KernelRates(Section):
    """Hold the rates of a kernel alone in one direction."""

    source: str
    causal: Curve
    full: Curve


class Kernel(Section):
    """Hold the rates of a kernel alone; "both" where only forward and backward together are published."""

    forward: KernelRates | None = None
    backward: KernelRates | None = None
    both: KernelRates | None = None

    def curve(self, direction: Direction) -> KernelRates:
        """Return the rates in a direction."""
        rates: KernelRates | None = getattr(self, direction)
        assert rates is not None, f"no rates {direction}"
        return rates


class Documents(Section):
    """Describe a distribution of documents: per cent of them up to a length."""

    source: str
    share: Curve


class PassGroup(Section):
    """Hold the TFLOPS a device of one method's attention passes by number of devices."""

    source: str
    method: str
    mask: Literal["causal", "packed"]
    forward: Curve
    backward: Curve


class StepRow(Section):
    """Hold what one training step took."""

    source: str
    method: str
    kernel: str
    model: str
    tokens: int
    devices: int
    seconds: float | None = None
    gigabytes: float | None = None
    tflops: float | None = None
    why: str | None = None


class LengthRow(Section):
    """Hold the longest sequence that somebody trained."""

    source: str
    method: str
    model: str
    devices: int
    tokens: int
    why: str | None = None


class Table(Section):
    """Hold all published rows and the rates that the model takes."""

    sources: dict[str, Source]
    machines: dict[str, Machine]
    kernels: dict[str, Kernel]
    documents: Documents
    models: dict[str, dict[str, int]]  # sizes of `plan/model_file.py`
    passes: list[PassGroup]
    steps: list[StepRow]
    lengths: list[LengthRow]


@cache
def published() -> Table:
    """Return the table of rows.yaml; pydantic's ValidationError lists what is wrong."""
    return Table.model_validate(yaml.safe_load(ROWS.read_text()))
