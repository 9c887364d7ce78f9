"""The keys of "long_sequence", which the folders of memory have."""

from __future__ import annotations

import re
from typing import Any

import pytest

from ds_ring.config.section import RingConfig
from ds_ring.memory.host.keys import HostKeys
from ds_ring.memory.tiles.keys import TileKeys, get_chunk_tokens
from tests.unit.config.test_section import refusal, section


def test_the_part_has_the_keys_of_both_folders() -> None:
    fields = {*TileKeys.model_fields, *HostKeys.model_fields}
    assert set(type(RingConfig(ring_size=2).long_sequence).model_fields) == fields
    assert "did you mean 'ring_attention.long_sequence.tiled_loss'?" in refusal(section(tiled_los=True))


@pytest.mark.parametrize(
    ("value", "parts"),
    [
        ("off", (False, False, False, False)),
        ("auto", ("auto", "auto", "auto", "auto")),
        ({"tiled_loss": True, "offload_checkpoints": "auto"}, (True, False, "auto", False)),
        ({"tiled_mlp": 512, "offload_attention": True}, (False, 512, False, True)),
    ],
)
def test_parts_of_a_long_sequence(value: Any, parts: tuple[Any, ...]) -> None:
    got = RingConfig.from_deepspeed(section(long_sequence=value)).long_sequence
    assert (got.tiled_loss, got.tiled_mlp, got.offload_checkpoints, got.offload_attention) == parts
    assert [type(part) for part in (got.tiled_loss, got.tiled_mlp)] == [type(part) for part in parts[:2]]
    assert got.changes_models == (value != "off")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("on", 'long_sequence: expected "off", "auto", or an object of its keys, got "on"; write "auto"'),
        (True, "long_sequence: expected .* got true"),
        ({"tiled_los": True}, "did you mean 'tiled_loss'"),
        ({"tiled_loss": 0}, r"long_sequence.tiled_loss: expected .* at least 1 \(tokens\), got 0"),
        ({"tiled_mlp": 1.0}, "long_sequence.tiled_mlp: expected .* got 1.0"),
        (
            {"offload_checkpoints": 1},
            'long_sequence.offload_checkpoints: expected "auto", true or false, got 1',
        ),
    ],
)
def test_a_long_sequence_that_is_refused(value: Any, words: str) -> None:
    assert re.search(words, refusal(section(long_sequence=value)))


def test_chunks_have_a_number_of_bytes() -> None:
    assert get_chunk_tokens(True, 32_000) == (64 << 20) // (4 * 32_000)
    assert get_chunk_tokens("auto", 128_256, "cuda") == (512 << 20) // (4 * 128_256)
    assert get_chunk_tokens(7, 32_000) == 7
    assert get_chunk_tokens(True, 1 << 30) == 64  # so few tokens that less would not be a matrix product
