"""`ds-ring profile` with virtual ranks: its files, its rows, and what it refuses. Real ones: tests/dist."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ds_ring_launcher import cli

SMALL = ["profile", "--tokens", "500", "--heads", "4", "--kv-heads", "2", "--head-dim", "16"]
FILES = {"memory.png", "steps.png", "timeline.png", "trace.json"}
ROOT = Path(__file__).resolve().parents[2]


def test_files_and_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "folder"
    arguments = ["--ring-sizes", "4", "1", "4", "--output", str(out), "--json", "--chunk-bytes", "1"]
    assert cli.main([*SMALL, *arguments]) == 0
    printed = capsys.readouterr()
    document = json.loads(printed.out)
    rows, (times,) = document["rings"], document["timelines"]
    assert {Path(path).name for path in document["files"]} == FILES
    assert [(row["run"], row["ring_size"]) for row in rows] == [("simulated", 1), ("simulated", 4)]
    for row in rows:
        assert sum(row["at_peak"].values()) == row["peak_bytes"] == max(row["peak_bytes_by_rank"])
        assert row["peak_bytes_by_rank"][row["ring_rank"]] == row["peak_bytes"]
    assert times["timeline"] == "simulated" and "10000 Mbit/s" in times["note"]
    assert len(times["compute_ms"]) == times["ring_size"] == 4
    assert {path.name for path in out.iterdir()} == FILES
    assert "written" in printed.err
    assert json.loads((out / "trace.json").read_text())["otherData"]["title"].startswith(
        "500 tokens, 4 heads"
    )


def test_a_table_for_people(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = str(ROOT / "configs" / "longnet.json")
    arguments = ["--ring-sizes", "2", "--config", config, "--forward-only", "--no-pictures"]
    assert cli.main([*SMALL, *arguments, "--output", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    for words in ("500 tokens, 4 heads on 2 K/V heads", "of 1/P", "q shard", "compute", "trace.json"):
        assert words in printed
    assert "dq, dk, dv" not in printed
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]


def test_a_number_that_is_none_is_refused_by_its_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([*SMALL, "--link-mbit", "nan"])
    assert ended.value.code == 2
    assert "--link-mbit: expected a number, got 'nan'" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("no folder")
    assert cli.main([*SMALL, "--output", str(tmp_path / "file")]) == 2
    assert "--output: expected a folder to write to" in capsys.readouterr().err
    if os.geteuid() != 0:  # root may write anywhere
        (tmp_path / "sealed").mkdir(mode=0o500)
        assert cli.main([*SMALL, "--output", str(tmp_path / "sealed")]) == 2
