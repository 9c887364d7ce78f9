"""What a plan and a measurement refuse that no other test triggers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ds_ring.errors import RingConfigError
from ds_ring_launcher.commands.parsers import require_writable
from ds_ring_launcher.plan.model_file import patterns_by
from ds_ring_launcher.plan.other_layers import _size, find_readers

QWEN: dict[str, Any] = {
    "model_type": "qwen3_next", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 89, "intermediate_size": 96, "linear_num_value_heads": 4,
    "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip


def test_what_a_config_says_of_layers_is_refused() -> None:
    with pytest.raises(RingConfigError, match="expected the type of each layer, got null"):
        patterns_by(QWEN)
    with pytest.raises(RingConfigError, match="linear_key_head_dim: expected a whole number of at least 1"):
        _size({"linear_key_head_dim": 0}, "linear_key_head_dim")
    with pytest.raises(RingConfigError, match=r'model_type: expected attention alone.* with "ssm_cfg"'):
        find_readers({"model_type": "another", "ssm_cfg": {}})
    assert find_readers({"model_type": "another", "index_topk": None, "compress": False}) == {}


@pytest.mark.parametrize("name", ["a\0b", "x" * 5000])
def test_a_name_that_no_file_has_is_refused(name: str) -> None:
    with pytest.raises(RingConfigError, match="expected a file's name"):
        require_writable(Path(name), "--output")
