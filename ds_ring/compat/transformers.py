"""What differs between versions of transformers."""

from __future__ import annotations

from typing import Any

from transformers import cache_utils, modeling_layers
from transformers.integrations import hub_kernels

try:
    from transformers import PreTrainedConfig as PreTrainedConfig
except ImportError:  # before 5.0
    from transformers import PretrainedConfig as PreTrainedConfig  # noqa: F401

# Layers of a cache without keys, from 5.23 on.
NO_CACHE_LAYER: Any = getattr(cache_utils, "DummyLayer", ())
# A base of classifiers that pool the last token.
POOLING_CLASSIFIER: Any = getattr(modeling_layers, "GenericForSequenceClassification", ())
# From 5.15 on recurrent layers call functions that other packages may replace, and that ds_ring wraps.
HAS_RECURRENT_FUNCTIONS = hasattr(hub_kernels, "use_kernel_func_from_hub_with_fallback")
RECURRENT_SINCE = "with transformers 5.17 or later"
