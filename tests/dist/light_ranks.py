"""Ranks that are nothing but a connection to a real monitor process: a thousand of them fit one machine.

Owns joining, beating, and the time until every rank knows the verdict. The protocol is ds_ring's own
(`health/failure_detector/handshake.py`), the monitor is started as rank 0 starts it.
"""

from __future__ import annotations

import json
import resource
import secrets
import selectors
import socket
import time
from types import TracebackType
from typing import Any

from ds_ring.health.failure_detector.handshake import RankHandshake
from ds_ring.health.joining import start_monitor

BEATS_PER_TIMEOUT = 5


class LightRanks:
    """`count` ranks of one job; a context that ends the monitor with them."""

    def __init__(self, count: int, heartbeat_timeout_s: float) -> None:
        self.count, self.heartbeat_timeout_s = count, heartbeat_timeout_s
        self.secret = secrets.token_hex(16)
        self.port = start_monitor("127.0.0.1", count, heartbeat_timeout_s, self.secret)
        self.connections: dict[int, socket.socket] = {}
        self.verdicts: dict[int, tuple[int, str]] = {}
        self._unread: dict[int, bytes] = {}
        self._selector = selectors.DefaultSelector()
        self._next_beat = 0.0
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft < count + 64:  # of this process; the monitor raises its own
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(count + 64, hard), hard))

    def __enter__(self) -> LightRanks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for connection in self.connections.values():
            connection.close()
        self._selector.close()

    def join(self, timeout_s: float = 30.0) -> float:
        """All at once; the seconds until the last one is welcome."""
        started = time.monotonic()
        handshakes = {rank: RankHandshake(self.secret.encode(), rank) for rank in range(self.count)}
        for rank, handshake in handshakes.items():
            connection = socket.create_connection(("127.0.0.1", self.port), timeout=timeout_s)
            connection.sendall(handshake.hello())
            connection.setblocking(False)
            self.connections[rank], self._unread[rank] = connection, b""
            self._selector.register(connection, selectors.EVENT_READ, rank)
        left = set(handshakes)
        while left:
            assert time.monotonic() < started + timeout_s, f"{len(left)} of {self.count} ranks did not join"
            for rank, line in self._lines(0.1):
                if b" challenge " in line:
                    self.connections[rank].sendall(handshakes[rank].answer(line))
                elif b" welcome" in line:
                    handshakes[rank].check_welcome(line)
                    left.discard(rank)
        return time.monotonic() - started

    def say(self, rank: int, **message: Any) -> None:
        """Send one message of a rank."""
        self.connections[rank].sendall(json.dumps(message).encode() + b"\n")

    def beat(self) -> None:
        """Let all ranks beat that are due."""
        if time.monotonic() >= self._next_beat:
            self._next_beat = time.monotonic() + self.heartbeat_timeout_s / BEATS_PER_TIMEOUT
            for rank in self.connections:
                self.say(rank, kind="beat")

    def run(self, seconds: float) -> None:
        """Beat and listen for a while."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.beat()
            self._listen(0.01)

    def await_verdict(self, timeout_s: float) -> None:
        """Beat and listen until every rank knows who failed."""
        deadline = time.monotonic() + timeout_s
        while not self.connections.keys() <= self.verdicts.keys():
            assert time.monotonic() < deadline, f"{len(self.verdicts)} of {self.count} know"
            self.beat()
            self._listen(0.05)

    def _listen(self, seconds: float) -> None:
        for rank, line in self._lines(seconds):
            message = json.loads(line)
            if message["kind"] == "fault":
                self.verdicts[rank] = (message["rank"], message["cause"])

    def _lines(self, seconds: float) -> list[tuple[int, bytes]]:
        """What came, by rank."""
        result = []
        for key, _ in self._selector.select(seconds):
            rank = key.data
            data = self.connections[rank].recv(65536)
            assert data, f"the monitor closed the connection of rank {rank}"
            *lines, self._unread[rank] = (self._unread[rank] + data).split(b"\n")
            result += [(rank, line) for line in lines]
        return result
