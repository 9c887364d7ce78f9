"""The rows of this folder: what others find by its names."""

from __future__ import annotations

from ds_ring.patterns.captured.keys import MaskModKeys
from ds_ring.patterns.captured.score_mod import ScoreMod
from ds_ring.patterns.captured.traced import CapturedValues
from ds_ring.plugin import Plugin

PLUGIN = Plugin(
    order=30,
    pattern_keys={"mask_mod": MaskModKeys},
    tracers={"score_mod": ScoreMod, "captured": CapturedValues},
)
