"""The monitor process itself, started as rank 0 starts it: what keeps it alive, who joins, how many."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from ds_ring.errors import RingMeshError
from ds_ring.health.joining import start_monitor
from ds_ring.health.monitor import failure_detector
from ds_ring.health.monitor.handshake import authenticate
from ds_ring.health.monitor.server import EMPTY_S
from tests.dist.light_ranks import LightRanks, verdict_seconds

pytestmark = pytest.mark.alone


def gone_within(port: int, seconds: float) -> bool:
    """Looks without connecting, which would keep nothing alive either."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if not any(
            c.laddr and c.laddr.port == port and c.status == "LISTEN" for c in psutil.net_connections("tcp")
        ):
            return True
        time.sleep(0.1)
    return False


def test_strangers_do_not_keep_it_alive() -> None:
    """It ended only when the last connection of anybody did."""
    with LightRanks(2, 5.0) as ranks:
        ranks.join()
        port = ranks.port
        stranger = socket.create_connection(("127.0.0.1", port))
        for rank in (0, 1):
            ranks.say(rank, kind="bye")
    with stranger:
        assert gone_within(port, 8.0)


def test_it_ends_with_the_last_rank_once_the_job_is_told_to_end() -> None:
    """A launcher waited a second for it before each attempt."""
    with LightRanks(2, 5.0) as ranks:
        ranks.join()
        port = ranks.port
        (monitor,) = {
            c.pid for c in psutil.net_connections("tcp") if (c.status, c.laddr.port) == ("LISTEN", port)
        }
        os.kill(monitor, signal.SIGTERM)
        ranks.run(0.3)
        assert not gone_within(port, 0.0)
        for rank in (0, 1):
            ranks.say(rank, kind="bye")
    assert gone_within(port, EMPTY_S / 2)


def test_it_listens_on_loopback_alone_for_ranks_of_one_host() -> None:
    with LightRanks(2, 5.0) as ranks:
        ranks.join()
        found = {c.laddr.ip for c in psutil.net_connections("tcp") if c.laddr and c.laddr.port == ranks.port}
        assert found == {"127.0.0.1"}


def test_a_rank_that_sends_garbage_has_failed_and_nobody_else() -> None:
    with LightRanks(3, 5.0) as ranks:
        ranks.join()
        ranks.connections[1].sendall(b"[" * 5000 + b"\n")
        unread = ranks.connections.pop(1)
        ranks._selector.unregister(unread)
        ranks.await_verdict(5.0)
        assert {rank for rank, _ in ranks.verdicts.values()} == {1}
        assert "what no rank sends" in ranks.verdicts[0][1]
        unread.close()


def test_a_second_connection_of_a_rank_is_refused_and_the_first_one_stays() -> None:
    with LightRanks(2, 5.0) as ranks:
        ranks.join()
        again = socket.create_connection(("127.0.0.1", ranks.port))
        with again, pytest.raises(OSError, match="closed"):
            authenticate(again, ranks.secret.encode(), 1, 5.0)
        ranks.run(0.3)
        assert not ranks.verdicts


@pytest.fixture
def few_files() -> Iterator[None]:
    """As after `ulimit -Sn 1024`; what the monitor raises is its own limit."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before[1] < 4000:
        pytest.skip("the hard limit is too low for 1,100 connections and their other ends")
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.usefixtures("few_files")
def test_1100_ranks_join_under_a_limit_of_1024_files() -> None:
    """1,018 connections ended it."""
    with LightRanks(1100, 10.0) as ranks:
        ranks.join()
        ranks.run(0.3)
        assert not ranks.verdicts


def test_a_hard_limit_that_is_too_low_is_said_at_the_start() -> None:
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(Path(failure_detector.__file__).parent)],
        input=json.dumps({"host": "", "world_size": 300, "secret": "x" * 32, "heartbeat_timeout_s": 5.0}),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256)),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode and "expected a limit of at least 348 open files" in done.stderr, done.stderr


@pytest.mark.parametrize("how", ["killed", "late in a collective"])
def test_a_verdict_over_1024_ranks_takes_less_than_a_second(how: str) -> None:
    """It took 3 to 13 s. `tools/bench_monitor.py` has the figures."""
    _, seconds = verdict_seconds(how, 1024, heartbeat_timeout_s=10.0)
    assert seconds < 1.0


def test_an_address_that_is_not_here_is_said_at_the_start() -> None:
    with pytest.raises(RingMeshError, match="did not start"):
        start_monitor("203.0.113.1", 2, 5.0, "x" * 32)
