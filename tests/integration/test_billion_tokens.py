"""A short long run: 2^20 tokens, two shardings, killed and resumed, rows held against float64."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from streamed.ledger import Ledger
from streamed.long_run import LongRun, errors
from streamed.ranks import PendingGradients

from ds_ring.errors import RingConfigError

ROOT = Path(__file__).resolve().parents[2]
TOKENS = 1 << 20
COMMAND = [sys.executable, "tools/billion_tokens.py", "--tokens", str(TOKENS), "--ranks", "16", "--backward"]
LIMIT_MIB = 1024


def start(state: Path, *more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COMMAND, "--state", str(state), "--save-every", "1", "--check-rows", "1000", *more],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )


def agree(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Largest difference of two checksums, relative to the magnitudes that were summed."""
    assert set(one) == set(other) == {"out", "lse", "dq", "dk", "dv"}
    gaps = [abs(one[n][s] - other[n][s]) / one[n]["absolute"] for n in one for s in ("plain", "weighted")]
    return max(gaps)


def in_this_process(ring_size: int) -> dict[str, Any]:
    job = LongRun(tokens=TOKENS, ring_size=ring_size, backward=True, workers=1, query_block=1 << 15)
    ranks, pending = job.ranks(), PendingGradients(job.head_dim)
    ledger = Ledger(job.source, job.checked_rows[:0], ring_size)
    for rank in job.ranks_of(0):
        ledger.note_all(rank, job.parts(ranks, rank, pending))
    assert not len(pending.table()[0])
    return ledger.totals


@pytest.mark.slow
@pytest.mark.night
def test_a_killed_run_goes_on_and_another_sharding_agrees(tmp_path: Path) -> None:
    first = start(tmp_path / "state")
    files = [tmp_path / "state" / f"worker_{worker}.npz" for worker in range(2)]
    deadline = time.monotonic() + 200
    while not all(file.exists() for file in files):  # each has a rank
        assert first.poll() is None and time.monotonic() < deadline, first.communicate()[1][-2000:]
        time.sleep(0.02)
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate()
    assert first.returncode == -signal.SIGKILL
    done = 0
    for file in files:
        with np.load(file) as state:
            done += int(state["done"].sum())
    assert 2 <= done < 16

    second = start(tmp_path / "state")
    other = in_this_process(8)  # meanwhile
    out, err = second.communicate(timeout=240)
    assert second.returncode == 0, err
    row = json.loads(out)
    assert row["ranks_here"] == 16 - done
    assert row["rows_checked"] > 1000
    assert set(row["errors"]) == {"out", "lse", "dq", "dk", "dv"}
    assert max(row["errors"].values()) < 1e-6, row
    assert agree(row["checksums"], other) < 1e-9
    assert all(200 < peak < LIMIT_MIB for peak in row["peak_rss_mib"]), row["peak_rss_mib"]


def test_the_state_of_another_run_is_refused(tmp_path: Path) -> None:
    job = LongRun(tokens=TOKENS, ring_size=16)
    job.state_file(tmp_path, 0).save(*job.restored(tmp_path, 0))
    assert not (tmp_path / "worker_0.partial").exists()
    job.restored(tmp_path, 0)
    with pytest.raises(RingConfigError, match="name another folder"):
        LongRun(tokens=TOKENS, ring_size=16, seed=1).restored(tmp_path, 0)


def test_a_permutation_would_be_seen() -> None:
    """Two neighbours swapped: the plain sums stay, the weighted ones do not; and the rows are wrong."""
    job = LongRun(tokens=1 << 14, ring_size=4, first_segment=64, workers=1, rows=200, query_block=1000)
    ranks, pending = job.ranks(), PendingGradients(job.head_dim)
    right = Ledger(job.source, job.checked_rows, 4)
    wrong = Ledger(job.source, job.checked_rows, 4)
    for rank in range(4):
        for part in job.parts(ranks, rank, pending):
            right.note(rank, part)
            assert part.out is not None
            wrong.note(rank, part._replace(out=part.out.roll(1, 2)))
    gaps = {
        name: abs(right.totals["out"][name] - wrong.totals["out"][name]) / right.totals["out"]["absolute"]
        for name in ("plain", "weighted")
    }
    assert gaps["plain"] < 1e-9 < 1e-6 < gaps["weighted"], gaps
    assert errors(job, right)["out"] < 1e-6 < 0.1 < errors(job, wrong)["out"]


@pytest.mark.parametrize(
    "sizes", [{"ring_size": 3}, {"growth": 1}, {"workers": 0}, {"ring_size": 1}, {"first_segment": 1 << 21}]
)
def test_wrong_sizes(sizes: dict[str, int]) -> None:
    with pytest.raises(RingConfigError, match="expected"):
        LongRun(**{"tokens": TOKENS, "ring_size": 16, **sizes})


@pytest.mark.night
def test_a_layer_of_a_large_ring_needs_what_one_of_a_small_ring_needs() -> None:
    """The last rank of 4 and of 64, 64 Ki tokens each, on fake tensors."""
    totals = []
    for ranks in (4, 64):
        sizes = ["--tokens", str(ranks << 16), "--ranks", str(ranks), "--fake", str(ranks - 1)]
        done = subprocess.run(
            [sys.executable, "tools/billion_tokens.py", *sizes],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=240,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
        assert done.returncode == 0, done.stderr
        totals.append(json.loads(done.stdout)["peak_mib"]["total"])
    shard_mib = (1 << 16) * 4 * 32 * 4 / 2**20
    assert 15 * shard_mib < totals[0] < 30 * shard_mib
    assert totals[1] == pytest.approx(totals[0], rel=0.01)
