"""The rows of this folder: what others find by its names."""

from __future__ import annotations

from ds_ring.measure.keys import MeasureKeys
from ds_ring.measure.rates import fastest_here
from ds_ring.measure.run_report import RunReport
from ds_ring.measure.step_metrics import Monitor
from ds_ring.plugin import Plugin

PLUGIN = Plugin(
    order=20,
    rates={"cuda": fastest_here},
    engine_parts={"monitor": Monitor, "run_report": RunReport},
    json_keys={"MeasureKeys": MeasureKeys},
)
