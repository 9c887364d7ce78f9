"""tools/gpu_first.py: its rows on the CPU, what survives a row that crashes, the command for a machine."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gpu_first
import psutil
import pytest
import torch
from benchmarks import gpu_rates
from gpu_rows import conductor, kernels, machine, probes, questions, self_ring
from gpu_rows.conductor import Book, conduct
from gpu_rows.order import CALLS, KERNELS, PARTS, TOTAL_S, Row, get_call, rows

from ds_ring.kernels.interface import PartialGrads
from tests.fake_cuda import cuda_guard, fake_gpu, fake_tensors

ROOT = Path(__file__).parents[2]
README = (ROOT / "tools" / "README.md").read_text()
SECONDS = 110.0  # of all rows on the CPU: processor time, on a machine that others keep busy


def results_in(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "gpu_first.jsonl").read_text().splitlines()[1:]]


def run(folder: Path, *arguments: str, environment: dict[str, str] | None = None) -> Any:
    command = [sys.executable, "tools/gpu_first.py", "--output", str(folder), *arguments]
    given = os.environ | {"OMP_NUM_THREADS": "1"} | (environment or {})
    return subprocess.run(command, cwd=ROOT, env=given, capture_output=True, text=True, check=False)


def test_the_order_is_that_of_worth() -> None:
    for device in KERNELS:
        found = list(rows(device))
        assert len({(row.part, row.name) for row in found}) == len(found) > 40
        assert len({row.part for row in found}) + (device == "cpu") == len(PARTS)
        order = [part for part in PARTS if part in {row.part for row in found}]
        assert list(dict.fromkeys(row.part for row in found)) == order, "each part once, in this order"
    limit = sum(row.seconds for row in rows("cuda") if row.part in ("versions", "kernels", "overlap"))
    assert all(0 < row.seconds <= 165 for row in rows("cuda")) and limit < 3600
    of_nccl = [row.environment for row in rows("cuda") if row.part == "nccl"]
    assert all(one["NCCL_MULTI_RANK_GPU_ENABLE"] == "1" for one in of_nccl)


def test_the_questions_come_first_one_kernel_a_row_within_their_seconds() -> None:
    found = list(rows("cuda"))
    questions = [row for row in found if row.part == "questions"]
    assert found[: len(questions)] == questions
    order = [
        ("flex, old tables", 8), ("flex, ", 12), ("flex, LongNet, 32 Ki", 16), ("cuDNN, documents, 32 Ki", 7),
        ("cuDNN, LongNet, 32 Ki", 7), ("cuDNN, 64", 1.5), ("cuDNN, 1 x", 0.5), ("cuDNN, layouts", 25),
        ("FA2, a rank's pass", 5), ("cuDNN, a rank's pass", 5), ("flex backward", 40), ("FA2, 409", 5),
    ]  # fmt: skip
    names = [(row.name, row.budget) for row in questions]
    for prefix, seconds in order:
        rest = [budget for name, budget in names if name.startswith(prefix)]
        if prefix == "flex, ":
            rest = [budget for name, budget in names[:3]]  # and test_flex.py between them
        assert rest and names[0][0].startswith(prefix)
        assert sum(rest) == pytest.approx(seconds), prefix
        names = names[len(rest) :]
    assert names == [("test_merge.py", 20)]
    spent, calls = 0.0, []
    for row in found:
        spent += row.budget
        calls.append(get_call(spent))
    assert calls == sorted(calls, key=["call 1", "call 2", "beyond the budget"].index)
    assert calls[len(questions) - 1] == "call 1" and TOTAL_S / CALLS <= 295
    assert all(row.seconds > row.budget for row in found)


@pytest.mark.night
def test_a_dry_run_leaves_nothing_among_the_results() -> None:
    """(A real run would have taken its rows for computed ones.)"""
    before = sorted((ROOT / "tools/results").iterdir())
    command = [sys.executable, "tools/gpu_first.py", "--dry-run"]
    environment = {name: value for name, value in os.environ.items() if name != "OUT"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0 and "no GPU" in done.stdout, done.stderr[-2000:]
    assert sorted((ROOT / "tools/results").iterdir()) == before


@pytest.mark.night
def test_a_dry_run_ends_each_row_with_no_gpu(tmp_path: Path) -> None:
    done = run(tmp_path, "--dry-run")
    assert done.returncode == 0, done.stderr[-2000:]
    found = [one for one in results_in(tmp_path) if one["results"]]
    assert [(one["part"], one["row"]) for one in found] == [(row.part, row.name) for row in rows("cuda")]
    assert all(one["results"]["ended"] == "no GPU" and not one["wrong"] for one in found)
    within = [one["results"] for one in found if one["results"]["call"] != "beyond the budget"]
    assert within[-1]["over_after_s"] <= 590 and len(within) > 60


@pytest.mark.parametrize("device", KERNELS)
def test_each_row_calls_a_function_with_its_arguments(device: str) -> None:
    """Rows that need CUDA are not computed here."""
    for row in rows(device):
        module, _, function = row.call.partition(".")
        found = inspect.signature(getattr(importlib.import_module(f"gpu_rows.{module}"), function))
        assert found.bind(device, **row.arguments), row
        assert json.loads(json.dumps(row))


@pytest.mark.night
def test_rows_of_a_gpu_on_fake_cuda_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls of FlashAttention's and cuDNN's operators are torch's; merges and autograd are not."""
    for owner in (kernels, gpu_rates, questions):
        monkeypatch.setattr(owner, "sdpa", lambda *_: (lambda: None, lambda: None))
    monkeypatch.setattr(gpu_rates, "merge_", lambda *_: None)
    for name in ("merge_", "merge_parts_", "add_parts_"):
        monkeypatch.setattr(f"ds_ring.ring.accumulator.{name}", lambda *_: None)
    monkeypatch.setattr(PartialGrads, "add_to", lambda *_: None)
    with fake_gpu(synchronize=None, current_device=0), cuda_guard(), fake_tensors():
        for kernel in ("FA2", "cuDNN"):
            (row,) = kernels.timed("cuda", kernel)
            assert row.case["tokens"] == 16_384 and row.results["backward_tflops"] > 0
            (row,) = questions.time_production("cuda", kernel)
            assert row.results["backward alone_ms"] > 0
        (row,) = probes.host("cuda", "flash")
        assert row.results["backward_us"] > 0


CRASHES = ("exception", "os._exit", "SIGKILL", "hang")


def crash(way: str) -> None:
    """End, or hang, as a row may."""
    if way == "exception":
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    if way == "os._exit":
        os._exit(3)
    if way == "SIGKILL":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(3600)


def fake(way: str, bad: list[tuple[str, str]], row: Row) -> Iterator[Any]:
    """Yield a result, crash if it is a bad row, and yield another one."""
    yield {}, {"before": 1}, ""
    if (row.part, row.name) in bad:
        crash(way)
    yield {}, {"after": 1}, ""


@pytest.mark.day("SIGKILL")
@pytest.mark.parametrize("way", [*CRASHES[:3], pytest.param("hang", marks=pytest.mark.night)])
def test_a_row_that_crashes_costs_no_other_row(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Each row of a GPU (by day, every ninth) crashes once.

    What it had yielded stays, its fault is named, and all others end.
    """
    monkeypatch.setattr(conductor, "START_S", 5.0)
    limit = 0.4 if way == "hang" else 30.0  # others must end by themselves, on a busy machine, too
    chosen = [row._replace(seconds=limit) for row in rows("cuda")]
    chosen = chosen[:: 1 if request.config.getoption("night") else 9]
    for turn in (0, 1):
        bad = [(row.part, row.name) for row in chosen[turn::2]]
        book = Book(tmp_path / str(turn), {})
        conduct(chosen, book, partial(fake, way, bad), 600, partial(bool, turn))
        found = results_in(tmp_path / str(turn))
        assert found == book.results
        named = {(one["part"], one["row"]): one["wrong"] for one in found if one["wrong"]}
        assert set(named) == set(bad)
        words = {
            "exception": "illegal memory",
            "os._exit": "ended with 3",
            "SIGKILL": "with -9",
            "hang": "within 0.4",
        }
        assert all(words[way] in one for one in named.values()), named
        assert sum("before" in one["results"] for one in found) == len(chosen)
        after = {(one["part"], one["row"]) for one in found if "after" in one["results"]}
        assert after == {(row.part, row.name) for row in chosen} - set(bad)


def grandchild(row: Row) -> Iterator[Any]:
    """Leave a process behind that has the pipe, and end without a word."""
    left = os.fork()
    if left == 0:
        time.sleep(600)
    yield {"left": left}, {}, ""
    os._exit(0)


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_process_that_a_row_leaves_behind_is_ended(tmp_path: Path) -> None:
    book, begin = Book(tmp_path, {}), time.monotonic()
    first = [row._replace(seconds=60.0) for row in rows("cpu")][:1]
    conduct(first, book, grandchild, 600, lambda: True)
    assert time.monotonic() - begin < 30
    assert "the process ended with 0" in book.results[-1]["wrong"]
    pid, until = book.results[0]["case"]["left"], time.monotonic() + 30
    while is_alive(pid) and time.monotonic() < until:
        time.sleep(0.05)
    assert not is_alive(pid)


def test_rows_that_are_not_reached_are_named_and_done_at_the_next_call(tmp_path: Path) -> None:
    chosen, calls = list(rows("cuda"))[:4], []

    def compute(row: Row) -> Iterator[Any]:
        yield {}, {"value": row.name}, "wrong number" if row is chosen[1] and not calls else ""

    where = {"commit": "a"}
    conduct(chosen[:2], Book(tmp_path, where), compute, 60, lambda: True)
    book = Book(tmp_path, where)
    conduct(chosen[2:], book, compute, 0, lambda: True)
    assert [one["wrong"] for one in book.results if one["wrong"]] == ["not reached; call again"] * 2
    with (tmp_path / "gpu_first.jsonl").open("a") as file:
        file.write('{"part": "versions", "row": "cut by a cra')
    calls.append("again")
    book = Book(tmp_path, where)
    assert book.done == {f"{chosen[0].part}: {chosen[0].name}"}, "a row with a wrong result is computed again"
    conduct(
        [row for row in chosen if f"{row.part}: {row.name}" not in book.done], book, compute, 60, lambda: True
    )
    assert len(book.done) == 4 and not any(one["wrong"] for one in book.results)
    assert [one["row"] for one in book.results if "value" in one["results"]] == [row.name for row in chosen]
    assert Book(tmp_path, {"commit": "b"}).done == set(), "results of another commit"


@pytest.mark.night  # by day rows are killed, not the command
def test_what_is_written_survives_the_end_of_the_command(tmp_path: Path) -> None:
    """SIGKILL, as at the limit of a borrowed machine: all rows that had ended are there."""
    command = [sys.executable, "tools/gpu_first.py", "--device", "cpu", "--output", str(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
        seen = [next(process.stdout) for _ in range(8)]
        process.send_signal(signal.SIGKILL)
    ended = [one for one in results_in(tmp_path) if "seconds" in one]
    assert len(ended) >= 8 == len(seen)
    assert all(one["row"] in line for one, line in zip(ended, seen, strict=False))
    assert "float64 reference" in (tmp_path / "gpu_first.md").read_text()


@pytest.mark.night
def test_all_rows_on_the_cpu(tmp_path: Path) -> None:
    """Each row has results, none is wrong, and the files that come back are few and small."""
    before = os.times()
    done = run(tmp_path, "--device", "cpu", "--minutes", "4")
    after = os.times()
    assert done.returncode == 0, done.stderr[-2000:]
    found = results_in(tmp_path)
    assert not [one for one in found if one["wrong"]]
    for row in rows("cpu"):
        of_row = [one for one in found if (one["part"], one["row"]) == (row.part, row.name)]
        assert len(of_row) >= 2 and of_row[0]["results"], row
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {
        "gpu_first.jsonl", "gpu_first.md", "gpu_first.log", "rates.json", "hardware.yaml", "tests_gpu.log",
        "trace.json.gz",
    }  # fmt: skip
    assert len(names) <= 8 and all(path.stat().st_size < 16 << 20 for path in tmp_path.iterdir())
    taken = sum(after[2:4]) - sum(before[2:4])
    assert taken < SECONDS, f"{taken:.0f} s of processor time"
    assert "| a rank is killed | 3 |" in done.stdout and "A ring that sends to itself" in done.stdout


def test_a_lost_message_of_the_ring_that_sends_to_itself_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ring's processes inherit the fault; the rows after it are right."""
    calls, real = [], self_ring.copied

    def lose_the_third(operations: list[Any]) -> list[Any]:
        calls.append(len(operations))
        return real([] if len(calls) == 3 else operations) or [self_ring.Done() for _ in operations]

    monkeypatch.setenv("GPU_FIRST_FOLDER", str(tmp_path))
    chosen = [row for row in rows("cpu") if row.name in ("exact, flash", "exact, cpu")]
    book = Book(tmp_path / "seeded", {})
    with monkeypatch.context() as lost:
        lost.setattr(self_ring, "copied", lose_the_third)
        conduct(chosen, book, partial(gpu_first.compute, "cpu"), 120, lambda: True)
    wrong = [one for one in book.results if one["wrong"]]
    assert len(wrong) == 1 and wrong[0]["wrong"] == "expected errors below 1e-05"
    assert len([one for one in book.results if one["results"]]) == 4  # hop by hop, in stages


@pytest.mark.parametrize(
    ("counts", "status", "wrong"),
    [
        ("12 passed, 3 skipped in 9 s", 0, ""),
        ("12 passed, 1 failed in 9 s", 1, "12 passed, 1 failed in 9 s"),
        ("40 skipped in 1 s", 0, "no test of tests/gpu/a.py passed: 40 skipped in 1 s"),
    ],
)
def test_tests_that_failed_or_did_not_run_are_wrong(counts: str, status: int, wrong: str) -> None:
    assert machine.tests_row("a.py", counts, status, "cuda").wrong == wrong


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_a_machine_without_a_gpu_is_told_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        gpu_first.main(["--output", str(tmp_path)])
    assert ended.value.code == 2 and "no CUDA device here" in capsys.readouterr().err


def command_of_the_readme() -> str:
    """The command that tools/README.md gives for a bare machine."""
    found = re.search(r"```bash\n# on the machine with the GPU\n(.+?)\n```", README, re.DOTALL)
    return found[1]


def test_the_command_for_a_bare_machine_is_short_and_parses(tmp_path: Path) -> None:
    command = command_of_the_readme()
    assert len(command) <= 2000 and re.search(r"\btimeout (\d+)\b", command)
    assert int(re.search(r"\btimeout (\d+)\b", command)[1]) < 600  # type: ignore[index]
    for script in (command, (ROOT / "tools/gpu_machine.sh").read_text()):
        assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
    assert subprocess.run(
        ["bash", "-n"], input=script + "\nif", text=True, capture_output=True, check=False
    ).returncode


@pytest.mark.night
def test_the_command_for_a_bare_machine_runs(tmp_path: Path) -> None:
    """It installs what is carried in a folder of its own, and leaves the results in $OUT."""
    wheels = tmp_path / "wheels"
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(wheels),
        ".",
    ]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    given = {
        "OUT": str(tmp_path / "out"),
        "WHEELS": str(wheels),
        "PYTHON": sys.executable,
        "OMP_NUM_THREADS": "1",
    }
    command = f"{command_of_the_readme()} --device cpu --parts versions"
    done = subprocess.run(
        ["bash", "-c", command], cwd=ROOT, env=os.environ | given, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert {path.suffix for path in (tmp_path / "out").iterdir()} == {".jsonl", ".md", ".log"}
    assert "## Versions and implementations" in done.stdout
    assert shlex.split(command)
