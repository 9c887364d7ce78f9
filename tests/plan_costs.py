"""Costs that searches of the planner ask for in each of its commands: computed once in a process."""

from __future__ import annotations

import pickle

import pytest

from ds_ring_launcher.plan import hiding
from ds_ring_launcher.plan.layer_passes import LayerPass, slowest_passes
from ds_ring_launcher.plan.training_setting import TrainingSetting

_FOUND: dict[bytes, tuple[LayerPass, ...]] = {}


def _slowest_passes(setting: TrainingSetting, bytes_per_s: float) -> tuple[LayerPass, ...]:
    key = pickle.dumps((setting, bytes_per_s))
    if key not in _FOUND:
        _FOUND[key] = slowest_passes(setting, bytes_per_s)
    return _FOUND[key]


@pytest.fixture(autouse=True)
def costs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Import it into a module: its tests share the real costs, which are most of their time."""
    monkeypatch.setattr(hiding, "slowest_passes", _slowest_passes)
