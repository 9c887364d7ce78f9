"""What a configuration is shrunk to."""

from __future__ import annotations

from typing import Any

from ds_ring_launcher.check.small_model import _shrink_layers


def test_a_small_model_keeps_a_layer_of_each_kind_that_shares_keys() -> None:
    """Layers 4 and 5 take the keys of others, and each kind of layer is there with keys of its own, too."""
    types = ["sliding", "full"]
    values: dict[str, Any] = {"num_hidden_layers": 6, "layer_types": types * 3, "num_kv_shared_layers": 2}
    _shrink_layers(values, 2)
    assert values == {
        "num_hidden_layers": 4, "layer_types": types * 2, "num_kv_shared_layers": 2
    }  # fmt: skip
