"""The watch board: a small process that hears every rank's heartbeat and says who failed first.

Owns the judgement and the sockets of the board. It is run by its path, on the standard library alone, so that
it starts in milliseconds, and it outlives every rank: it leaves its parent at once and ends when the last
rank is gone. The ranks' side is `watch.py`.

[Note: the board]
A store of torch could hold heartbeats, too, but it dies with the rank that hosts it (or costs a second
process with all of torch), and it does not notice that a client is gone. Here the end of a connection is
the message: a rank that is killed, aborts or crashes is known in milliseconds, one that is stopped or cut
off after the heartbeat timeout. There is one judge, so the first fault wins and every survivor names the
same culprit.

[Note: who is to blame]
A rank that waits too long accuses the rank it waits for; but that one may be waiting itself. The board knows
every wait that lasts longer than a moment, follows them to their end and names the rank that waits for
nobody. Where ranks wait for each other in a circle, the one that is at another place than most is named.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

GRACE_S = 0.5  # a late or broken wait is judged after this: the deaths behind it are heard first
LEFT_S = 1.0  # somebody still waits so long after a rank said goodbye: it left too early
JOIN_S = 60.0  # all ranks join so long after the first one, at the latest
EMPTY_S = 1.0  # the board ends when nobody was connected for so long
TICK_S = 0.1
PAUSED_S = 1.0  # the board itself was not running for so long: silence is then nobody's fault


class Fault(NamedTuple):
    """Who failed, by world rank, and what was seen."""

    rank: int
    cause: str


@dataclass
class Wait:
    """A wait under way: for whom (world ranks; a collective has many), at which (call, hop), since when."""

    on: list[int]
    place: tuple[int, int]
    what: str
    since: float


@dataclass
class Seen:
    """What is known of a rank."""

    heard: float
    left: float | None = None
    wait: Wait | None = None


@dataclass
class Judge:
    """Decides who failed first. Pure: every event comes with its time, in seconds."""

    world_size: int
    heartbeat_timeout_s: float
    ranks: dict[int, Seen] = field(default_factory=dict)
    fault: Fault | None = None
    _first_join: float = 0.0
    _accused: list[tuple[float, int, list[int], str]] = field(default_factory=list)  # due, by, whom, cause

    def join(self, rank: int, now: float) -> None:
        self._first_join = self._first_join if self.ranks else now
        self.ranks[rank] = Seen(now)

    def hear(self, rank: int, message: dict[str, Any], now: float) -> None:
        """Take one message of a rank that has joined."""
        seen = self.ranks[rank]
        seen.heard = now
        kind = message.get("kind")
        if kind == "wait":
            call, hop = message["place"]
            seen.wait = Wait(message["on"], (call, hop), message["what"], now)
        elif kind == "go":
            seen.wait = None
        elif kind == "accuse":
            self._accused.append((now + GRACE_S, rank, message["on"], message["cause"]))
        elif kind == "failed":
            self._blame(rank, message["cause"])
        elif kind == "bye":
            seen.left, seen.wait = now, None

    def close(self, rank: int) -> None:
        """The connection of a rank ended."""
        if self.ranks[rank].left is None:
            self._blame(rank, "its process ended without a goodbye (killed, aborted or crashed)")

    def forgive(self, seconds: float) -> None:
        """The board was not running for so long."""
        for seen in self.ranks.values():
            seen.heard += seconds

    def look(self, now: float) -> Fault | None:
        """The first fault, if there is one by now."""
        if self.fault is None:
            self._look_for_silence(now)
            self._look_at_waits(now)
            for due, by, whom, cause in self._accused:
                if due <= now and self.fault is None:
                    self._settle(by, whom, cause)
            self._accused = [one for one in self._accused if one[0] > now]
        return self.fault

    def _blame(self, rank: int, cause: str) -> None:
        if self.fault is None:
            self.fault = Fault(rank, cause)

    def _look_for_silence(self, now: float) -> None:
        for rank, seen in self.ranks.items():
            silent = now - seen.heard
            if seen.left is None and silent > self.heartbeat_timeout_s:
                self._blame(rank, f"no heartbeat for {silent:.1f} s: it is stopped, or cut off")
        if self.ranks and now - self._first_join > JOIN_S and len(self.ranks) < self.world_size:
            missing = next(rank for rank in range(self.world_size) if rank not in self.ranks)
            self._blame(missing, f"it did not join the watch within {JOIN_S:g} s")

    def _look_at_waits(self, now: float) -> None:
        for rank, seen in self.ranks.items():
            if seen.wait is None:
                continue
            last, _ = self._end_of_waits(rank)
            left = self.ranks[last].left if last in self.ranks else None
            if left is not None and now > LEFT_S + max(left, seen.wait.since):
                self._blame(
                    last, f"it left (its process exited) while others were waiting at {seen.wait.what}"
                )

    def _settle(self, by: int, whom: list[int], cause: str) -> None:
        last, circle = self._end_of_waits(by)
        if not circle:
            self._blame(whom[0] if last == by else last, cause)
            return
        places = Counter(self._place(rank) for rank in circle)
        usual = places.most_common(1)[0][0]
        odd = [rank for rank in circle if self._place(rank) != usual]
        where = ", ".join(f"rank {rank} at {self._what(rank)}" for rank in sorted(circle))
        self._blame(odd[0] if odd else whom[0], f"{cause}; ranks wait for each other: {where}")

    def _place(self, rank: int) -> tuple[int, int] | None:
        wait = self.ranks[rank].wait
        return wait.place if wait else None

    def _what(self, rank: int) -> str:
        wait = self.ranks[rank].wait
        return wait.what if wait else "no wait"

    def _end_of_waits(self, rank: int) -> tuple[int, list[int]]:
        """Follow the waits from a rank: the one that waits for nobody, or the circle they end in."""
        path = [rank]
        while True:
            seen = self.ranks.get(path[-1])
            if seen is None or seen.wait is None:
                return path[-1], []
            following = self._slowest(seen.wait)
            if following in path:
                return following, path[path.index(following) :]
            path.append(following)

    def _slowest(self, wait: Wait) -> int:
        """Of those that a rank waits for: one that does not wait, or is elsewhere, or the first."""

        def order(rank: int) -> int:
            place = self._place(rank) if rank in self.ranks else None
            return 0 if place is None else 1 if place != wait.place else 2

        return min(wait.on, key=order)


@dataclass
class _Client:
    connection: socket.socket
    rank: int | None = None
    unread: bytes = b""


class Board:
    """The sockets around a judge."""

    def __init__(self, listener: socket.socket, judge: Judge, token: str) -> None:
        self.listener, self.judge, self.token = listener, judge, token
        self.selector = selectors.DefaultSelector()
        self.selector.register(listener, selectors.EVENT_READ)
        self.clients: list[_Client] = []
        self.told = False

    def serve(self) -> None:
        """Until everybody is gone, or nobody came."""
        last_busy = before = time.monotonic()
        while True:
            for key, _ in self.selector.select(TICK_S):
                if key.fileobj is self.listener:
                    self._accept()
                else:
                    self._read(key.data)
            now = time.monotonic()
            if now - before > PAUSED_S:
                self.judge.forgive(now - before)
            before = now
            fault = self.judge.look(now)
            if fault is not None and not self.told:
                self.told = True
                self._tell_all(fault)
            if self.clients:
                last_busy = now
            elif now - last_busy > (EMPTY_S if self.judge.ranks else JOIN_S):
                return

    def _accept(self) -> None:
        connection, _ = self.listener.accept()
        connection.settimeout(1.0)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        client = _Client(connection)
        self.clients.append(client)
        self.selector.register(connection, selectors.EVENT_READ, client)

    def _read(self, client: _Client) -> None:
        try:
            data = client.connection.recv(65536)
        except OSError:
            data = b""
        if not data:
            self._drop(client)
            return
        *lines, client.unread = (client.unread + data).split(b"\n")
        for line in lines:
            try:
                self._take(client, json.loads(line))
            except (ValueError, KeyError, TypeError):  # not one of ours
                self._drop(client)
                return

    def _take(self, client: _Client, message: dict[str, Any]) -> None:
        now = time.monotonic()
        if client.rank is None:
            if message["token"] != self.token:
                raise ValueError("another job")
            client.rank = int(message["rank"])
            self.judge.join(client.rank, now)
            self._send(client, {"kind": "welcome", "token": self.token})
            if self.judge.fault is not None:
                self._tell(client, self.judge.fault)
            return
        self.judge.hear(client.rank, message, now)
        if message.get("kind") == "beat":
            self._send(client, message)

    def _drop(self, client: _Client) -> None:
        if client not in self.clients:
            return
        self.clients.remove(client)
        self.selector.unregister(client.connection)
        client.connection.close()
        if client.rank is not None:
            self.judge.close(client.rank)

    def _tell_all(self, fault: Fault) -> None:
        for client in list(self.clients):
            if client.rank is not None:
                self._tell(client, fault)

    def _tell(self, client: _Client, fault: Fault) -> None:
        self._send(client, {"kind": "fault", "rank": fault.rank, "cause": fault.cause})

    def _send(self, client: _Client, message: dict[str, Any]) -> None:
        try:
            client.connection.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            self._drop(client)


def _listen() -> socket.socket:
    """On every address of this host, of both families where it has both."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    return socket.create_server(("", 0), backlog=1024)


def main(world_size: int, heartbeat_timeout_s: float) -> None:
    """Print the port once it is bound, leave the parent, serve. The token comes on standard input."""
    token = sys.stdin.readline().strip()
    listener = _listen()
    listener.setblocking(False)
    print(listener.getsockname()[1], flush=True)
    if os.fork():
        os._exit(0)
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    Board(listener, Judge(world_size, heartbeat_timeout_s), token).serve()


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
