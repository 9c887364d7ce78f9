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
from typing import Any, NamedTuple

import psutil
import pytest

from ds_ring.errors import RingMeshError
from ds_ring.health.failure_detector import verdicts
from ds_ring.health.failure_detector.admission import DetectorHandshake
from ds_ring.health.failure_detector.handshake import authenticate
from ds_ring.health.failure_detector.server import (
    ASKED_S,
    EMPTY_S,
    Client,
    Server,
    listen_at,
    raise_file_limit,
)
from ds_ring.health.joining import start_monitor
from tests.dist.light_ranks import LightRanks


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


@pytest.mark.alone
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
        [sys.executable, "-I", "-S", str(Path(verdicts.__file__).parent)],
        input=json.dumps({"host": "", "world_size": 300, "secret": "x" * 32, "heartbeat_timeout_s": 5.0}),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256)),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode and "expected a limit of at least 348 open files" in done.stderr, done.stderr


def test_an_address_that_is_not_here_is_said_at_the_start() -> None:
    with pytest.raises(RingMeshError, match="to start the monitor process, got exit code"):
        start_monitor("203.0.113.1", 2, 5.0, "x" * 32)


def test_a_line_that_is_too_long_is_no_message_of_a_rank() -> None:
    detector = verdicts.FailureDetector(2, 10.0)
    detector.join(0, 0.0)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        server = Server([], detector, b"secret", 1)
        client = Client(ours, "here", 0.0, DetectorHandshake(b"secret", 2))
        client.handshake.rank, client.handshake.done = 0, True
        server.ranks[0] = client
        server._take(client, b"x" * (server.line_bytes + 1))
    assert detector.fault is not None and f"a line of {server.line_bytes + 1} bytes" in detector.fault.cause


def test_a_host_whose_ports_are_all_taken_on_loopback_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    make = socket.create_server

    def taken(address: tuple[str, int], **options: Any) -> socket.socket:
        if address[1]:
            raise OSError("address in use")
        return make(("127.0.0.1", 0))

    monkeypatch.setattr(socket, "create_server", taken)
    with pytest.raises(
        OSError, match=r"a port that is free at 127\.0\.0\.2 and 127\.0\.0\.1, got none in 20"
    ):
        listen_at("127.0.0.2")


class Rank(NamedTuple):
    """A rank that a server knows, and the other end of its connection."""

    client: Client
    end: socket.socket

    def heard(self) -> list[dict[str, Any]]:
        self.end.setblocking(False)
        try:
            data = self.end.recv(65536)
        except BlockingIOError:
            return []
        return [json.loads(line) for line in data.splitlines()]


def test_a_late_rank_is_asked_where_it_is_and_one_other_rank_is_told() -> None:
    detector = verdicts.FailureDetector(3, 100.0)
    server, ranks = Server([], detector, b"secret", 1), []
    for rank in range(3):
        detector.join(rank, 0.0)
        ours, theirs = socket.socketpair()
        client = Client(ours, "here", 0.0, DetectorHandshake(b"secret", 3))
        client.handshake.rank, client.handshake.done = rank, True
        server.selector.register(ours, 1, client)
        server.ranks[rank] = client
        ranks.append(Rank(client, theirs))
    others = {"on": [[2, 2]], "place": [1, 1], "what": "call 1", "limit": 10.0, "key": "a_key"}
    detector.hear(1, {"kind": "wait", **others}, 0.0)
    server._look(0.5)
    assert [one.heard() for one in ranks] == [[], [], []]
    server._look(1.1)
    assert [one.heard() for one in ranks] == [[], [], [{"kind": "where"}]]
    detector.hear(2, {"kind": "at", "text": "load (train.py:3)"}, 1.2)
    server._look(1.2)
    (told,) = ranks[0].heard()
    assert ranks[2].heard() == [told] and ranks[1].heard() == []
    assert told["kind"] == "late" and told["rank"] == 2 and told["at"] == "load (train.py:3)"
    server._look(3.0)
    assert ranks[0].heard() == [], "it is said once"
    detector.hear(1, {"kind": "go"}, 3.1)
    server._look(3.2)
    (told,) = ranks[0].heard()
    assert told["kind"] == "on time" and told["rank"] == 2


def test_a_late_rank_that_does_not_answer_is_named_without_its_place() -> None:
    detector = verdicts.FailureDetector(2, 100.0)
    server = Server([], detector, b"secret", 1)
    for rank in range(2):
        detector.join(rank, 0.0)
    message = {"kind": "wait", "on": [[1, 1]], "place": [1, 1], "what": "call 1", "limit": 1.0, "key": "k"}
    detector.hear(0, message, 0.0)
    for now in (0.2, 0.9):
        server._look(now)
    assert server.late[1].reporter is None
    server._look(1.2 + ASKED_S)
    assert server.late[1].reporter is not None


def test_a_host_without_room_for_the_connections_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (64, 100))
    monkeypatch.setattr(resource, "setrlimit", lambda which, limits: None)
    assert raise_file_limit(8) == 60
    with pytest.raises(OSError, match=r"a limit of at least 148 open files .* got a hard limit of 100"):
        raise_file_limit(100)
