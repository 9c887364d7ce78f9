"""What commands print for people is no wider than 80 columns where stdout is no terminal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ds_ring_launcher import cli
from ds_ring_launcher.tables import WIDTH
from tests.integration.test_plan_command import CPU, SIZES

ATTENTION = ["--tokens", "500", "--heads", "4", "--kv-heads", "2", "--head-dim", "16"]


def plan(folder: Path) -> int:
    return cli.main(["plan", *SIZES, *CPU, "--tokens", "1000000", "--devices", "2"])


def simulate(folder: Path) -> int:
    return cli.main(["simulate", *ATTENTION, "--ring-sizes", "1", "3", "--backward", "--check", "5"])


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (plan, ["memory of a device", "optimizer states", "does not fit", "step"]),
        (simulate, ["peak", "sent by a rank"]),
    ],
)
def test_no_line_is_wider_than_80_columns(
    command: Callable[[Path], int],
    words: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command(Path("out")) == 0
    printed = capsys.readouterr().out
    assert [line for line in printed.splitlines() if len(line) > WIDTH] == []
    assert "…" not in printed  # nothing is left out either
    assert [word for word in words if word not in printed] == []
