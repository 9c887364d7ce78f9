"""`ds-ring simulate`: its figures, its table, and what it refuses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ds_ring_launcher import cli

SMALL = ["simulate", "--tokens", "500", "--heads", "4", "--kv-heads", "2", "--head-dim", "16"]
ROOT = Path(__file__).resolve().parents[2]


def rows_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict]:
    assert cli.main([*SMALL, "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)["rings"]  # one document


@pytest.mark.parametrize("arguments", [[], ["--pattern", '{"window": 50}'], ["--dtype", "bfloat16"]])
def test_every_gradient_is_checked(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    one, three = rows_of(
        capsys, "--ring-sizes", "1", "3", "--backward", "--check", "500", "--chunk-bytes", "1", *arguments
    )
    assert (one["ring_size"], three["ring_size"]) == (1, 3)
    limit = 2**-7 if "bfloat16" in arguments else 2e-6
    for row in (one, three):
        assert row["rows_checked"] == 500 and set(row["errors"]) == {"out", "dq", "dk", "dv"}
        assert 0 < max(row["errors"].values()) < limit, row
        assert row["peak_bytes"] == sum(row["at_peak"].values())
    assert one["sent_bytes"] == 0 < three["sent_bytes"] <= three["sent_bytes_all_ranks"]
    assert one["less_percent"] == 0 and three["less_percent"] > 40


def test_a_wrong_result_would_be_seen(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check does not go through what it checks: keys of another seed are an error of order 1."""
    from ds_ring.simulation import simulate

    monkeypatch.setattr(
        simulate, "_read", lambda source, name, head, at: _of_another_seed(source, name, head, at)
    )
    (row,) = rows_of(capsys, "--ring-sizes", "2", "--check", "20")
    assert row["errors"]["out"] > 0.1


def _of_another_seed(source, name, head, positions):
    import numpy as np
    import torch

    from ds_ring.simulation.simulate import GeneratedSource

    sizes = source.geometry
    other = GeneratedSource(sizes.tokens, sizes.query_heads, sizes.kv_heads, sizes.head_dim, seed=1)
    x = torch.empty(1, 1, len(positions), sizes.head_dim)
    other.fill(name, slice(head, head + 1), np.stack([positions, *np.ones((2, len(positions)), int)], 1), x)
    return x[:, 0].double()


def test_a_table_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    config = str(ROOT / "configs" / "longnet.json")
    assert cli.main([*SMALL, "--config", config, "--ring-sizes", "1", "2", "--check"]) == 0
    printed = capsys.readouterr()
    assert "500 tokens, 4 heads" in printed.out and "workspace" in printed.out and "e-0" in printed.out
    assert printed.err == ""


@pytest.mark.night  # by day while a command imports, in test_launcher_tune.py
def test_ctrl_c_is_one_line_and_status_130() -> None:
    """In the middle of the work: what was done was said, no traceback follows."""
    many = ["--tokens", "8192", "--ring-sizes", "1", "1024"]  # a million hops
    command = subprocess.Popen(
        [sys.executable, "-m", "ds_ring_launcher.cli", *SMALL, *many, "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        # In the background of a shell it is ignored, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        # On a slow machine there is a bar before it.
        line = next(line for line in command.stderr if "ranks:" not in line and line.strip())
        assert line == "ds-ring simulate: ring 1 done\n"
        command.send_signal(signal.SIGINT)
        rest, said = command.communicate(timeout=60)
    finally:
        command.kill()
        command.wait()
    assert command.returncode == 130 and "ds-ring: interrupted" in said and "Traceback" not in said
    assert rest == ""
