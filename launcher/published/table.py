"""Read the published measurements of rows.yaml: the only file that knows its keys."""

from __future__ import annotations

from collections.abc import Collection
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, model_validator

from ds_ring.config.messages import Section

ROWS = Path(__file__).with_name("rows.yaml")

Direction = Literal["forward", "backward", "both"]
Curve = dict[int, float]  # TFLOP/s by length of the sequence


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
    machine: str
    kernel: str
    mask: Literal["causal", "packed"]
    tokens: int
    heads: int
    kv_heads: int
    forward: Curve = Field(default_factory=dict)
    backward: Curve = Field(default_factory=dict)
    both: Curve = Field(default_factory=dict)
    why: str | None = None  # what explains figures that are off, or that nothing does


class Model(Section):
    """Describe a model by the sizes of `plan/model_file.py`."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int


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
    models: dict[str, Model]
    passes: list[PassGroup]
    steps: list[StepRow]
    lengths: list[LengthRow]

    @model_validator(mode="after")
    def _names_exist(self) -> Table:
        """Refuse a row whose source, machine, kernel or model the file does not have."""
        rates = [(kernel.forward, kernel.backward, kernel.both) for kernel in self.kernels.values()]
        named: list[tuple[str, Collection[str]]] = [
            (each.source, self.sources) for three in rates for each in three if each is not None
        ]
        named += [(name, self.sources) for machine in self.machines.values() for name in machine.sources]
        named.append((self.documents.source, self.sources))
        for group in self.passes:
            named += [
                (group.source, self.sources),
                (group.machine, self.machines),
                (group.kernel, self.kernels),
            ]
        for step in self.steps:
            named += [(step.source, self.sources), (step.model, self.models), (step.kernel, self.kernels)]
        for length in self.lengths:
            named += [(length.source, self.sources), (length.model, self.models)]
        absent = sorted({name for name, known in named if name not in known})
        if absent:
            raise ValueError(f"expected names that the file has, got {', '.join(absent)}; add them")
        return self


@cache
def published() -> Table:
    """Return the table that comes with this package."""
    return table_from(yaml.safe_load(ROWS.read_text()))


def table_from(values: dict[str, Any]) -> Table:
    """Return a table of the values of a file; pydantic's ValidationError lists what is wrong."""
    return Table.model_validate(values)
