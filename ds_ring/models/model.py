"""The table of what ds_ring changes in transformers, and the owners that several files patch.

Imports neither torch nor transformers: `registration.py` uses it while transformers is imported.
"""

from __future__ import annotations

from ds_ring.patches import PatchTable

PRETRAINED = "transformers.modeling_utils.PreTrainedModel"
TABLE = PatchTable("transformers", ">=4.56")
MODEL = TABLE.given("model", PRETRAINED)
GENERATOR = TABLE.given("generator", "transformers.GenerationMixin")
CONFIG = TABLE.given("config", "transformers.PretrainedConfig")
PART = TABLE.given("part", "torch.nn.Module")  # of a model
