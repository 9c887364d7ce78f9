"""Puts the repository on sys.path, so that `ds_ring` and `tests.dist.harness` are found by every test.

Spawned ranks inherit the parent's sys.path, so what is importable here is importable there.
"""

from __future__ import annotations

import compileall
import fcntl
import gc
import importlib.util
import os
import sys
from collections.abc import Generator
from pathlib import Path
from typing import IO, Any

# A process that a test starts would compile ds_ring again, 0.3 s of its processor time, if none may keep it.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
gc.disable()  # until all is imported: what is imported stays, and a collection finds nothing (1 s of 4.6)

import pytest  # noqa: E402
from _pytest.assertion import rewrite  # noqa: E402

ROOT = str(Path(__file__).resolve().parent.parent)
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)

from tests.dist.rank_server import start_server, use_server  # noqa: E402
from tests.machine import skip_without  # noqa: E402
from tests.selection import pytest_addoption, pytest_collection_modifyitems  # noqa: E402, F401

_INSIDE = pytest.StashKey[IO[str] | None]()  # the lock that this worker holds from one test to the next


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that `needs` what this machine lacks, with the reason."""
    for marker in item.iter_markers("needs"):
        skip_without(*marker.args)


def pytest_configure(config: pytest.Config) -> None:
    """Prepare a process that runs tests; one that hands them to workers needs no torch (3 s)."""
    workerinput = getattr(config, "workerinput", None)
    if workerinput is not None:
        use_server(workerinput["rank_server"])
        _rewrite_tests(config, int(workerinput["workerid"].removeprefix("gw")), workerinput["workercount"])
    elif config.getoption("numprocesses", None):
        _compile_packages()
        gc.enable()
        return
    import torch
    from hypothesis import settings

    # Two workers with a thread for each core would spin against each other: tests took ten times as long.
    torch.set_num_threads(1)
    # The same random cases in each run of the day, others and more of them in each run of the night.
    settings.register_profile("day", derandomize=True, max_examples=60, deadline=None)
    settings.register_profile("night", max_examples=400, deadline=None)
    settings.load_profile("night" if config.option.night else "day")


def _compile_packages() -> None:
    """Compile the large packages of a new environment once, not in each worker that imports them (17 s)."""
    for name in ("torch", "sympy", "deepspeed", "networkx"):
        spec = importlib.util.find_spec(name)
        source = spec and spec.origin
        if source and not Path(importlib.util.cache_from_source(source)).exists():
            compileall.compile_dir(Path(source).parent, quiet=2, workers=2)


def _rewrite_tests(config: pytest.Config, worker: int, workers: int) -> None:
    """Cache a share of the test files: each worker would rewrite all of a new checkout (5 s)."""
    state = config.stash[rewrite.assertstate_key]
    for path in sorted(Path(ROOT, "tests").rglob("test_*.py"))[worker::workers]:
        cached = rewrite.get_cache_dir(path) / f"{path.stem}{rewrite.PYC_TAIL}"
        if rewrite._read_pyc(path, cached) is None and rewrite.try_makedirs(cached.parent):
            source_hash, code = rewrite._rewrite_test(path, config)
            rewrite._write_pyc(state, code, source_hash, cached)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Let all workers fork ranks from one server: its imports take 7 s of a processor."""
    node.workerinput["rank_server"] = start_server()


@pytest.fixture(autouse=True)
def nothing_is_kept_for_ever() -> Generator[None, None, None]:
    """Refuse buffers that a test keeps for torch to write to: this process would end with exit status 1."""
    yield
    stuck_waits = sys.modules.get("ds_ring.health.stuck_waits")
    kept = [] if stuck_waits is None else list(map(type, stuck_waits._in_stuck_waits))
    if kept:
        stuck_waits._in_stuck_waits.clear()
    assert not kept, 'replace "_in_stuck_waits" in the test'


def pytest_collection_finish(session: pytest.Session) -> None:
    """Let collections look at what tests make, not at 400 thousand objects of modules (0.3 s each time)."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, object, object]:
    """With several workers (`-n 4`): while tests that are marked `alone` run, the others wait.

    Such tests hold deadlines of a second or so, which other tests on the same cores would break. Whoever
    comes to the door first goes through first; inside are any number of tests, or one worker whose tests are
    alone. It stays while its next test is, too: taking turns, each worker would wait for every test of the
    other. This wait is no part of the test's own limit of time.
    """
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return (yield)
    inside = item.config.stash.get(_INSIDE, None) or _go_inside(item)
    try:
        return (yield)
    finally:
        if _is_alone(item) and nextitem is not None and _is_alone(nextitem):
            item.config.stash[_INSIDE] = inside
        else:
            item.config.stash[_INSIDE] = None
            inside.close()


def _is_alone(item: pytest.Item) -> bool:
    return item.get_closest_marker("alone") is not None


def _go_inside(item: pytest.Item) -> IO[str]:
    shared = item.config._tmp_path_factory.getbasetemp().parent  # type: ignore[attr-defined]  # of all workers
    inside = open(shared / "inside", "w")  # noqa: SIM115 (closed by who called)
    with open(shared / "door", "w") as door:
        fcntl.flock(door, fcntl.LOCK_EX)
        fcntl.flock(inside, fcntl.LOCK_EX if _is_alone(item) else fcntl.LOCK_SH)
    return inside
