"""How the launcher runs a command: exit status, signals, and that no process stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from ds_ring_launcher.run import process
from ds_ring_launcher.run.job import Invocation
from ds_ring_launcher.run.process import GRACE_SECONDS
from tests.clock import wait_until

SCRIPT = "train.py"
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture(autouse=True)
def heard_signals() -> Iterator[None]:
    """Runs in the background of a shell ignore SIGINT, under nohup SIGHUP; the launcher leaves it so."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_the_limit_of_open_files_is_raised_for_all_that_is_started() -> None:
    code = "import resource; from ds_ring_launcher.run.job import raise_file_limit as r; r(); r();"
    code += "print(*resource.getrlimit(resource.RLIMIT_NOFILE))"
    command = f"ulimit -Sn 1024; ulimit -Hn 3000; {sys.executable} -c '{code}'"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.stdout.split() == ["3000", "3000"], done.stderr


def run(*argv: str, grace_seconds: float = GRACE_SECONDS) -> int:
    """As `start.py` calls it: signals are noted around it."""
    invocation = Invocation(list(argv), {})
    with process.signals_noted() as signals:
        return process.run(invocation, dict(os.environ), SCRIPT, signals, process.Grace(grace_seconds))


def run_python(code: str, *arguments: str, grace_seconds: float = GRACE_SECONDS) -> int:
    return run(sys.executable, "-c", code, *arguments, grace_seconds=grace_seconds)


def is_alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def send_when(ready: Callable[[], object], number: signal.Signals, times: int = 1) -> threading.Thread:
    """Start a thread that sends this process a signal; two of them after a while, and half a second apart."""

    def send() -> None:
        wait_until(ready)
        for _ in range(times):
            time.sleep(0.5 * (times - 1))  # until the child ignores SIGTERM
            os.kill(os.getpid(), number)

    sender = threading.Thread(target=send)
    sender.start()
    return sender


# Starts a child that outlives it, in a session of its own, and notes the child's pid in the file argv[1].
LEAVES_A_CHILD = """
import pathlib, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[2], *sys.argv[3:]], start_new_session=True)
pathlib.Path(sys.argv[1]).write_text(str(child.pid))
"""
SLEEPS = "import time; time.sleep(600)"
IGNORES_SIGTERM = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEPS}"


@pytest.mark.parametrize("status", [0, 1, 7])
def test_status_is_forwarded(status: int) -> None:
    assert run_python(f"raise SystemExit({status})") == status


def test_death_by_a_signal_is_a_failure() -> None:
    assert run_python("import os, signal; os.kill(os.getpid(), signal.SIGKILL)") == 128 + signal.SIGKILL


def test_environment_and_files_are_there(tmp_path: Path) -> None:
    code = f"import os; raise SystemExit(open({str(tmp_path / 'hostfile')!r}).read() != os.environ['A'])"
    invocation = Invocation([sys.executable, "-c", code], {"A": "x y"}, {tmp_path / "hostfile": "x y"})
    assert process.run(invocation, {}, SCRIPT, [], process.Grace()) == 0


@pytest.mark.parametrize("child", [SLEEPS, IGNORES_SIGTERM], ids=["sleeps", "ignores SIGTERM"])
@pytest.mark.parametrize("status", [0, 5])
def test_nothing_is_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, child: str, status: int
) -> None:
    monkeypatch.setattr(process, "_SETTLE_SECONDS", 0.5)
    code = f"{LEAVES_A_CHILD}\nraise SystemExit({status})"
    assert run_python(code, str(tmp_path / "pid"), child, grace_seconds=0.5) == status
    assert not is_alive(int((tmp_path / "pid").read_text()))


def test_success_that_leaves_a_rank_running_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(process, "_SETTLE_SECONDS", 0.5)
    assert run_python(LEAVES_A_CHILD, str(tmp_path / "pid"), SLEEPS, SCRIPT) == 1
    assert "ended with status 0 but left ranks running" in capsys.readouterr().err
    assert not is_alive(int((tmp_path / "pid").read_text()))


@pytest.mark.parametrize("number", SIGNALS)
def test_signal_ends_everything(tmp_path: Path, number: signal.Signals) -> None:
    pid_file = tmp_path / "pid"

    before = signal.getsignal(number)
    sender = send_when(lambda: pid_file.exists() and pid_file.read_text(), number)
    assert run_python(f"{LEAVES_A_CHILD}\n{SLEEPS}", str(pid_file), SLEEPS) == 128 + number
    sender.join()
    assert not is_alive(int(pid_file.read_text()))
    assert signal.getsignal(number) is before


def test_second_signal_does_not_wait_for_the_grace(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"

    started = time.monotonic()
    sender = send_when(lambda: pid_file.exists() and pid_file.read_text(), signal.SIGINT, times=2)
    assert run_python(LEAVES_A_CHILD + SLEEPS, str(pid_file), IGNORES_SIGTERM) == 128 + signal.SIGINT
    assert time.monotonic() - started < GRACE_SECONDS / 2
    sender.join()
    assert not is_alive(int(pid_file.read_text()))


def test_mpirun_names_the_rank_and_runs_the_script(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    (tmp_path / "beside.py").write_text("VALUE = 3\n")
    script.write_text(
        "import os, sys, beside\nprint(os.environ['RANK'], sys.argv[1:], beside.VALUE, __name__)\n"
    )
    place = {"RANK": "1", "SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}
    environment = {**os.environ, **{f"OMPI_COMM_WORLD_{name}": value for name, value in place.items()}}
    command = [sys.executable, "-m", "ds_ring_launcher.engines.mpirun", str(script), "--x", "1"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "1 ['--x', '1'] 3 __main__\n"
    without = subprocess.run(command, env=dict(os.environ), capture_output=True, text=True, timeout=60)
    assert without.returncode == 1
    assert "expected to be started by Open MPI's mpirun" in without.stderr


# An engine that hands SIGTERM on to its rank, as DeepSpeed's does; the rank counts them, and saves for 1 s.
ENGINE = """
import os, pathlib, signal, subprocess, sys
rank = subprocess.Popen([sys.executable, "-c", sys.argv[2], sys.argv[1]], env={**os.environ, "RANK": "0"})
signal.signal(signal.SIGTERM, lambda *_: rank.terminate())
sys.exit(rank.wait())
"""
SAVES = """
import pathlib, signal, sys, time
heard, told = pathlib.Path(sys.argv[1]), []
signal.signal(signal.SIGTERM, lambda *_: told.append(1))
heard.write_text("")
while not told:
    time.sleep(0.02)
time.sleep(1)
heard.write_text(f"{len(told)} signals")
"""


def test_without_a_run_folder_a_rank_is_told_once_to_end(tmp_path: Path) -> None:
    heard = tmp_path / "heard"

    sender = send_when(heard.exists, signal.SIGTERM)
    assert run_python(ENGINE, str(heard), SAVES, grace_seconds=60.0) == 128 + signal.SIGTERM
    sender.join()
    assert heard.read_text() == "1 signals"


def test_what_engines_and_ranks_have_started_is_no_rank() -> None:
    """These hear of the end from their rank, or not at all: it may need them while it saves."""
    mark = f"test {os.getpid()}"
    command = "env RANK=0 sh -c 'sleep 60 & wait' & sleep 60 & wait"
    engine = subprocess.Popen(["sh", "-c", command], env={**os.environ, process.MARK: mark})
    try:
        wait_until(lambda: len(process.marked(mark)) == 4)
        (rank,) = process._ranks(mark)
        assert rank.ppid() == engine.pid and rank.environ()["RANK"] == "0"
    finally:
        process.end_all(mark, 0.0)
        engine.wait()


@pytest.mark.night
def test_what_a_script_leaves_at_work_is_named_before_it_is_ended(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pid_file = tmp_path / "pid"
    assert run_python(LEAVES_A_CHILD, str(pid_file), SLEEPS, grace_seconds=0.2) == 0
    assert f"(pid {pid_file.read_text()}) at work, which end in 0.2 s" in capfd.readouterr().err
    assert not is_alive(int(pid_file.read_text()))


def test_a_killed_launcher_leaves_no_folder(tmp_path: Path) -> None:
    code = f"""
import os, sys
from ds_ring_launcher.run import process
from ds_ring_launcher.run.job import Invocation
with process.private_folder() as folder:
    made = Invocation([sys.executable, "-c", {SLEEPS!r}], {{}}, {{folder / "hostfile": "x"}})
    process.run(made, dict(os.environ), "train.py", [], process.Grace(1.0), folder)
"""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    started = subprocess.Popen([sys.executable, "-c", code], env=environment)
    wait_until(lambda: list(tmp_path.glob("ds-ring-*/hostfile")))
    time.sleep(0.5)  # the guardian is told after the file is there
    assert list(tmp_path.iterdir())
    started.kill()
    started.wait()
    wait_until(lambda: not list(tmp_path.iterdir()))


def test_closed_standard_streams_are_opened(tmp_path: Path) -> None:
    code = "from ds_ring_launcher.run.job import open_standard_streams as o; o(); import os, sys\n"
    code += "print('heard', file=sys.stdout), print('heard', file=sys.stderr)\n"
    code += f"os.fstat(0), os.fstat(1), os.fstat(2), open({str(tmp_path / 'done')!r}, 'w').write('yes')"
    subprocess.run(["sh", "-c", f'exec "{sys.executable}" -c "$1" <&- >&- 2>&-', "sh", code], check=True)
    assert (tmp_path / "done").read_text() == "yes"
