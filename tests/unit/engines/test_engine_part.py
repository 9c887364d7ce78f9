"""Keys of the JSON whose capability has been removed: its row is not in the registry's tables."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from ds_ring.config.section import RingConfig
from ds_ring.data.engine_part import check_engine_parts
from ds_ring.errors import RingConfigError
from ds_ring.ops.options import Options
from ds_ring.plugin import ENGINE_PARTS, MODEL_PARTS, SAVED_TENSORS

KEYS: dict[str, dict[str, Any]] = {
    "monitor": {"monitor": True},
    "rank_speeds": {"rank_speeds": "measured"},
    "tiled_loss": {"long_sequence": {"tiled_loss": True}},
    "tiled_mlp": {"long_sequence": {"tiled_mlp": 64}},
    "offload_checkpoints": {"long_sequence": {"offload_checkpoints": True}},
    "offload_attention": {"long_sequence": {"offload_attention": True}},
}


@pytest.mark.parametrize("key", KEYS)
def test_a_key_without_its_row_is_refused(key: str) -> None:
    config = RingConfig(ring_size=2, **KEYS[key])
    plain = RingConfig(ring_size=2, long_sequence="auto", rank_speeds=[1, 0.5])
    shown = {"csv_monitor": {"enabled": True}}
    check_engine_parts(config, shown)
    tables = [
        mock.patch.dict(table, {name: home for name, home in table.items() if name != key}, clear=True)
        for table in (ENGINE_PARTS, MODEL_PARTS, SAVED_TENSORS)
    ]
    with tables[0], tables[1], tables[2]:
        with pytest.raises(RingConfigError, match=f"{key}: expected it to be left out"):
            check_engine_parts(config, shown)
        check_engine_parts(plain, {})


def test_attention_is_not_kept_on_the_host_without_its_row() -> None:
    assert Options(offload_attention="auto").offload_on("cuda", 1 << 20)
    with mock.patch.dict(SAVED_TENSORS, clear=True):
        assert not Options(offload_attention="auto").offload_on("cuda", 1 << 20)
        with pytest.raises(RingConfigError, match="offload_attention: expected false, got true"):
            Options(offload_attention=True).offload_on("cpu", 64)
