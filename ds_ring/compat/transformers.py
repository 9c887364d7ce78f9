"""What differs between versions of transformers."""

from __future__ import annotations

from typing import Any

from transformers import cache_utils, modeling_layers

try:
    from transformers import PreTrainedConfig as PreTrainedConfig
except ImportError:  # before 5.0
    from transformers import PretrainedConfig as PreTrainedConfig  # noqa: F401

# Layers of a cache without keys, from 5.23 on.
NO_CACHE_LAYER: Any = getattr(cache_utils, "DummyLayer", ())
# A base of classifiers that pool the last token.
POOLING_CLASSIFIER: Any = getattr(modeling_layers, "GenericForSequenceClassification", ())
