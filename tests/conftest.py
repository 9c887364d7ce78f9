"""Puts the repository on sys.path, so that `ds_ring` and `tests.dist.harness` are found by every test.

Spawned ranks inherit the parent's sys.path, so what is importable here is importable there.
"""

from __future__ import annotations

import fcntl
import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

gc.disable()  # until all is imported: what is imported stays, and a collection finds nothing (1 s of 4.6)

import pytest  # noqa: E402

ROOT = str(Path(__file__).resolve().parent.parent)
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)

from tests.machine import skip_without  # noqa: E402
from tests.selection import pytest_addoption, pytest_collection_modifyitems  # noqa: E402, F401


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that `needs` what this machine lacks, with the reason."""
    for marker in item.iter_markers("needs"):
        skip_without(*marker.args)


def pytest_configure(config: pytest.Config) -> None:
    """Prepare a process that runs tests; one that hands them to workers needs no torch (3 s)."""
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        gc.enable()
        return
    import torch
    from hypothesis import settings

    # Two workers with a thread for each core would spin against each other: tests took ten times as long.
    torch.set_num_threads(1)
    # The same random cases in each run of the day, others in each run of the night.
    settings.register_profile("day", derandomize=True)
    settings.load_profile("default" if config.option.night else "day")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Let collections look at what tests make, not at 400 thousand objects of modules (0.3 s each time)."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def _alone_or_not(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """With several workers (`-n 2`): while a test that is marked `alone` runs, the others wait.

    Such tests hold deadlines of a second or so, which other tests on the same two cores would break. Whoever
    comes to the door first goes through first; inside are any number of tests, or one that is alone.
    """
    if "PYTEST_XDIST_WORKER" not in os.environ:
        yield
        return
    shared = tmp_path_factory.getbasetemp().parent  # of all workers
    how = fcntl.LOCK_EX if request.node.get_closest_marker("alone") else fcntl.LOCK_SH
    with open(shared / "inside", "w") as inside:
        with open(shared / "door", "w") as door:
            fcntl.flock(door, fcntl.LOCK_EX)
            fcntl.flock(inside, how)
        yield
