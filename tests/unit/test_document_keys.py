"""The tables of keys in configs/README.md: every key, written from the model, and up to date."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ds_ring.config.pattern_section import PatternConfig
from ds_ring.config.section import PARTS, RingConfig
from tools import document_keys


def test_the_tables_are_up_to_date() -> None:
    assert document_keys.main(["--check"]) == 0, "run: python tools/document_keys.py --write"


def test_every_key_has_a_row_with_default_and_meaning() -> None:
    rows = re.findall(
        r"^\| `(\w+)`[^|]* \| ([^|]+) \| `([^|]+)` \| ([^|]+) \|$", document_keys.tables(), re.MULTILINE
    )
    models = (RingConfig, PatternConfig, *PARTS.values())
    assert [row[0] for row in rows] == [name for model in models for name in model.model_fields]
    by_key = {key: (takes, default) for key, takes, default, _ in rows}
    assert by_key["layout"][0].startswith('`"auto"`, `"contiguous"`')
    assert by_key["sequence_parallel_size"][1] == '"auto"'
    assert by_key["hop_timeout_seconds"] == ("seconds", "60.0")
    assert by_key["window"][1] == "null"
    assert RingConfig.from_deepspeed({"ring_attention": {"ring_size": 2}}).sequence_parallel_size == 2


def test_a_stale_table_is_found_and_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = document_keys.DOCUMENT.read_text()
    stale = tmp_path / "README.md"
    stale.write_text(right.replace("| `60.0` |", "| `50.0` |"))
    monkeypatch.setattr(document_keys, "DOCUMENT", stale)
    assert document_keys.main(["--check"]) == 1
    assert document_keys.main(["--write"]) == 0
    assert stale.read_text() == right


def test_a_document_without_the_marks_is_refused() -> None:
    with pytest.raises(SystemExit, match="expected the lines"):
        document_keys.with_tables("no marks")
