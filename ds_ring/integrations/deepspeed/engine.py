"""What ds_ring changes in DeepSpeed, in an engine, and in Python and torch for an engine: owners of patches.

Patches are applied where their feature begins: in `enable`, `initialize`, a save, a load, a loader.
"""

from __future__ import annotations

from ds_ring.integrations.adapter import PatchTable

DEEPSPEED = PatchTable("deepspeed", ">=0.19.8,<0.20")
ENGINE = DEEPSPEED.given("engine", "deepspeed.runtime.engine.DeepSpeedEngine")
MODULE = DEEPSPEED.given("module", "torch.nn.Module")  # of an engine
