"""Serve the sockets of the monitor process: authenticated ranks, and clients that are not authenticated yet.

A client whose handshake is not finished is called a stranger. The process detaches from its parent at once
and ends after the last rank has disconnected.
"""

from __future__ import annotations

import json
import os
import resource
import selectors
import signal
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from .admission import DetectorHandshake
from .handshake import HANDSHAKE_LINE_BYTES, HandshakeError
from .verdicts import FailureDetector
from .wire import Fault

EMPTY_S = 1.0  # end the process if no rank was connected for this time
FIRST_S = 20.0  # end it if no rank has connected within this time of its start
TICK_S = 0.05
PAUSED_S = 1.0  # the monitor itself did not run for this time: do not count silence against any rank
STRANGER_S = 5.0  # maximum duration of a handshake
TURN_S = 0.5  # minimum duration that a handshake gets, even if others wait for its place
ACCEPTS = 64  # new connections that are accepted before the ranks are served again
ASKED_S = 1.0  # a late rank has so long to say where it is
UNSENT_BYTES = 1 << 18  # limit of unsent data for a client that does not read


# [Note: strangers]
# Anyone who can reach the port may connect, so no data before the handshake is trusted:
# - The lines of a handshake are short and have a fixed form (no JSON is parsed).
# - A handshake must end within `STRANGER_S`.
# - The number of open handshakes is limited. When it is reached, handshakes older than `TURN_S` are dropped,
#   first those of the address with the most connections.
# - Strangers do not keep the process alive.
# - No send blocks: data that a client does not read is kept up to a limit, then the client is dropped.
# So a stranger can delay a rank that is joining, but not a rank that has joined.
# [Note: the monitor process]
# A store of torch could also hold heartbeats. But it dies with the rank that hosts it (or needs a second
# process with all of torch), and it does not notice that a client is gone. Here the monitor sees the end of a
# connection: a rank that is killed, aborts or crashes is detected within milliseconds, a rank that is stopped
# or cut off after the heartbeat timeout.


@dataclass
class LateQuery:
    """A rank that others wait for: the time of the query for its stacks, and the rank that got the answer."""

    queried_at: float
    since: float
    reporter: int | None = None


@dataclass(eq=False)
class Client:
    """A connection; it is a stranger until its handshake is done."""

    connection: socket.socket
    address: str
    since: float
    handshake: DetectorHandshake
    unread: bytearray = field(default_factory=bytearray)
    unsent: bytearray = field(default_factory=bytearray)
    gone: bool = False


class Server:
    """Accept connections, authenticate ranks, and pass their messages to a failure detector.

    Args:
        listeners: bound sockets that listen.
        detector: decides which rank failed.
        secret: secret of the job, for handshakes.
        strangers: maximum number of connections whose handshake is not finished.
    """

    def __init__(
        self, listeners: list[socket.socket], detector: FailureDetector, secret: bytes, strangers: int
    ) -> None:
        self.detector, self.secret, self.strangers_at_most = detector, secret, strangers
        self.selector = selectors.DefaultSelector()
        self.listeners, self.listening = listeners, False
        self._listen(True)
        self.ranks: dict[int, Client] = {}
        self.strangers: dict[Client, None] = {}  # oldest first
        # One that waits for every second rank names them all.
        self.line_bytes = 16384 + 16 * detector.world_size
        self.has_reported, self.empty_s = False, EMPTY_S
        self.late: dict[int, LateQuery] = {}

    def serve(self) -> None:
        """Serve until every rank has disconnected, or none has connected in time."""
        last_busy = before = next_look = time.monotonic()
        while True:
            for key, events in self.selector.select(TICK_S):
                if key.data is None:
                    self._accept(key.fileobj)
                    continue
                if events & selectors.EVENT_WRITE:
                    self._flush(key.data)
                if events & selectors.EVENT_READ:
                    self._read(key.data)
            now = time.monotonic()
            # The host was suspended, for example: do not count that time against any rank.
            if now - before > PAUSED_S:
                self.detector.forgive(now - before)
            before = now
            if now >= next_look or (self.detector.fault is not None and not self.has_reported):
                next_look = now + TICK_S
                self._look(now)
            if self.ranks:
                last_busy = now
            elif now - last_busy > (self.empty_s if self.detector.heard else FIRST_S):
                return

    def end_after_ranks(self) -> None:
        """End as soon as no rank is connected."""
        self.empty_s = 0.0

    def _look(self, now: float) -> None:
        """Do the periodic work: report a fault, drop strangers that are too slow, make room for others."""
        fault = self.detector.look(now)
        if fault is not None and not self.has_reported:
            self.has_reported = True
            for rank in list(self.ranks):
                self._tell_fault(rank, fault)
        if fault is None:
            self._report_late_ranks(now)
        for client in list(self.strangers):
            if now - client.since <= STRANGER_S:
                break
            self._drop(client)
        if not self.listening:
            self._make_room(now)

    # Ask a late rank where it is, and tell it and one other rank, once, that others wait for it.
    def _report_late_ranks(self, now: float) -> None:
        late = self.detector.late_ranks(now)
        for rank, late_rank in late.items():
            notice = self.late.get(rank)
            if notice is None:
                self.late[rank] = LateQuery(now, late_rank.since)
                self.detector.ask_again(rank)
                self._tell(rank, {"kind": "where"})
            elif notice.reporter is None:
                at = self.detector.whereabouts(rank)
                if at is not None or now - notice.queried_at > ASKED_S:
                    notice.reporter = min((peer for peer in self.ranks if peer != rank), default=rank)
                    message = {
                        "kind": "late",
                        **late_rank._asdict(),
                        "since": now - late_rank.since,
                        "at": at or "",
                    }
                    for receiver in {rank, notice.reporter}:
                        self._tell(receiver, message)
        for rank in [rank for rank in self.late if rank not in late]:
            notice = self.late.pop(rank)
            if notice.reporter is not None:
                message = {"kind": "on time", "rank": rank, "since": now - notice.since}
                for receiver in {rank, notice.reporter}:
                    self._tell(receiver, message)

    def _accept(self, listener: Any) -> None:
        for _ in range(ACCEPTS):
            if len(self.strangers) >= self.strangers_at_most:
                self._make_room(time.monotonic())
                if not self.listening:
                    return
            try:
                connection, address = listener.accept()
            except BlockingIOError:
                return
            except OSError:  # no file descriptors left, or the client has disconnected already
                self._listen(False)
                return
            connection.setblocking(False)
            with suppress(OSError):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            handshake = DetectorHandshake(self.secret, self.detector.world_size)
            client = Client(connection, str(address[0]), time.monotonic(), handshake)
            self.strangers[client] = None
            self.selector.register(connection, selectors.EVENT_READ, client)

    def _make_room(self, now: float) -> None:
        """Drop strangers older than TURN_S of the address with most; if none, stop accepting."""
        of_address: dict[str, list[Client]] = {}
        for client in self.strangers:
            of_address.setdefault(client.address, []).append(client)
        most = max(of_address.values(), key=len, default=[])
        ready = len(self.strangers) < self.strangers_at_most
        for client in most[: max(1, len(most) // 2)]:
            if now - client.since > TURN_S:
                self._drop(client)
                ready = True
        self._listen(ready)

    def _listen(self, listening: bool) -> None:
        """Start or stop accepting; without it new connections wait in the kernel's queue."""
        if self.listening != listening:
            self.listening = listening
            for listener in self.listeners:
                if listening:
                    listener.setblocking(False)
                    self.selector.register(listener, selectors.EVENT_READ)
                else:
                    self.selector.unregister(listener)

    def _read(self, client: Client) -> None:
        if client.gone:
            return
        try:
            data = client.connection.recv(65536 if client.handshake.done else HANDSHAKE_LINE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(client)
            return
        client.unread += data
        *lines, rest = client.unread.split(b"\n")
        client.unread = rest
        for line in lines:
            if not client.gone:
                self._take(client, bytes(line))
        if len(rest) > (self.line_bytes if client.handshake.done else HANDSHAKE_LINE_BYTES):
            self._drop(client, "it sent a line without an end")

    def _take(self, client: Client, line: bytes) -> None:
        if not client.handshake.done:
            self._shake_hands(client, line)
            return
        try:
            if len(line) > self.line_bytes:
                raise ValueError(f"a line of {len(line)} bytes")
            message = json.loads(line)
            self.detector.hear(client.handshake.rank, message, time.monotonic())
        except (ValueError, RecursionError) as error:
            self._drop(client, f"it sent what no rank sends: {error!s:.200}")
            return
        if message["kind"] == "beat":
            self._send(client, b'{"kind": "beat"}\n')

    def _shake_hands(self, client: Client, line: bytes) -> None:
        try:
            answer = client.handshake.take(line[: HANDSHAKE_LINE_BYTES + 1])
        except HandshakeError:
            self._drop(client)
            return
        if client.handshake.done:
            rank = client.handshake.rank
            del self.strangers[client]
            if rank in self.detector.heard:  # a second connection for this rank: keep the first one
                client.handshake.done = False
                self._drop(client)
                return
            self.ranks[rank] = client
            self.detector.join(rank, time.monotonic())
        self._send(client, answer)
        if client.handshake.done and self.has_reported and self.detector.fault is not None:
            self._tell_fault(client.handshake.rank, self.detector.fault)

    def _drop(self, client: Client, cause: str = "") -> None:
        if client.gone:
            return
        client.gone = True
        with suppress(KeyError, ValueError):
            self.selector.unregister(client.connection)
        client.connection.close()
        self.strangers.pop(client, None)
        if client.handshake.done:
            del self.ranks[client.handshake.rank]
            if cause:
                self.detector.blame(client.handshake.rank, cause)
            self.detector.close(client.handshake.rank)

    def _tell_fault(self, rank: int, fault: Fault) -> None:
        self._tell(rank, {"kind": "fault", "rank": fault.rank, "cause": fault.cause})

    def _tell(self, rank: int, message: dict[str, Any]) -> None:
        client = self.ranks.get(rank)
        if client is not None:
            self._send(client, json.dumps(message).encode() + b"\n")

    def _send(self, client: Client, data: bytes) -> None:
        client.unsent += data
        self._flush(client)
        if len(client.unsent) > UNSENT_BYTES:
            self._drop(client, "it does not read what the monitor sends")

    def _flush(self, client: Client) -> None:
        if client.gone:
            return
        try:
            sent = client.connection.send(client.unsent)
        except BlockingIOError:
            sent = 0
        except OSError:
            self._drop(client)
            return
        del client.unsent[:sent]
        # Sends never block: the rest is sent when the socket becomes writable.
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.unsent else 0)
        if self.selector.get_key(client.connection).events != events:
            self.selector.modify(client.connection, events, client)


def main() -> None:
    """Read the settings, print the port once it is bound, detach from the parent process, and serve."""
    settings = json.loads(sys.stdin.readline())
    world_size = settings["world_size"]
    try:
        strangers = raise_file_limit(world_size)
        listeners = listen_at(settings["host"])
    except OSError as error:
        sys.exit(str(error))
    print(listeners[0].getsockname()[1], flush=True)
    # Detach from the parent, so that a launcher that ends a rank's children does not end the monitor.
    if os.fork():
        os._exit(0)
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    detector = FailureDetector(world_size, settings["heartbeat_timeout_s"])
    server = Server(listeners, detector, settings["secret"].encode(), strangers)
    # Ranks that receive this signal, too, may still save a checkpoint, so the monitor ends after them.
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda *_: server.end_after_ranks())
    server.serve()


STRANGERS = 256  # connections that have not shaken hands, besides one for each rank
OTHER_FILES = 32  # descriptors of the process itself
BACKLOG = 4096  # newcomers in the kernel's queue
LOOPBACK = "127.0.0.1"
PORTS = 20  # tries


def raise_file_limit(world_size: int) -> int:
    """Raise this process's limit of open files; return the number of strangers that there is room for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * world_size + STRANGERS + OTHER_FILES
    limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    limit = max(limit, soft) if soft != resource.RLIM_INFINITY else wanted
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    strangers = limit - world_size - OTHER_FILES
    if strangers < 16:
        raise OSError(
            f"expected a limit of at least {world_size + OTHER_FILES + 16} open files for {world_size} ranks,"
            f" got a hard limit of {hard}; raise it on the host of rank 0 (ulimit -Hn {wanted}, LimitNOFILE=)"
        )
    return min(strangers, world_size + STRANGERS)


def listen_at(host: str) -> list[socket.socket]:
    """Open one port at one address of this host, and at loopback."""
    # Ranks of this host come by loopback, which works while the network does not. An empty `host` is every
    # address, of both families where there are both.
    if not host and socket.has_dualstack_ipv6():
        return [socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=BACKLOG)]
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for _ in range(PORTS):
        listener = socket.create_server((host, 0), family=family, backlog=BACKLOG)
        if not host or host == LOOPBACK:
            return [listener]
        try:
            port = listener.getsockname()[1]
            return [listener, socket.create_server((LOOPBACK, port), backlog=BACKLOG)]
        except OSError:  # another process has that port of loopback
            listener.close()
    raise OSError(f"expected a port that is free at {host} and {LOOPBACK}, got none in {PORTS} tries")
