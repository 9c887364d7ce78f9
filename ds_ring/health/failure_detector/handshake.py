"""Let a rank and the monitor process each prove that it knows the job's secret: the rank's side.

Owns the four lines that are exchanged before anything else. The secret itself never crosses the wire: each
side sends a random nonce, and the other answers with an HMAC-SHA256 over both nonces, the rank and its own
role, so that no answer serves another connection, another rank or the other direction.

    rank:    ds_ring/1 hello RANK NONCE
    monitor: ds_ring/1 challenge NONCE PROOF     (the monitor proves itself first)
    rank:    ds_ring/1 answer PROOF
    monitor: ds_ring/1 welcome                   (from here on: lines of JSON)

What comes before the welcome is untrusted: lines are short, and only these forms are read.

`multiprocessing.connection` has a handshake, too, and cannot replace this one: its calls block, so that one
stranger would stop the monitor; its digest is MD5 before Python 3.12, and covers neither rank nor role.

[Note: what the handshake protects]
The monitor listens on loopback for a job of one host, otherwise on the address by which the store was
reached. Messages after the handshake are neither signed nor encrypted.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import socket
import time

VERSION = "ds_ring/1"
HANDSHAKE_LINE_BYTES = 256  # a line before the welcome
SECRET_BYTES = 16  # the least that a secret may have: it could be guessed from one answer otherwise
MONITOR, RANK = "monitor", "rank"  # roles
HELLO = re.compile(rf"{VERSION} hello (\d{{1,7}}) ([0-9a-f]{{32}})", re.ASCII)
_CHALLENGE = re.compile(rf"{VERSION} challenge ([0-9a-f]{{32}}) ([0-9a-f]{{64}})", re.ASCII)
ANSWER = re.compile(rf"{VERSION} answer ([0-9a-f]{{64}})", re.ASCII)
_WELCOME = re.compile(rf"{VERSION} welcome", re.ASCII)


class HandshakeError(Exception):
    """Report that the other side is not of this job, or does not speak this protocol."""


def compute_proof(secret: bytes, role: str, rank: int, rank_nonce: str, monitor_nonce: str) -> str:
    text = f"{VERSION} {role} {rank} {rank_nonce} {monitor_nonce}"
    return hmac.new(secret, text.encode(), hashlib.sha256).hexdigest()


def match_line(form: re.Pattern[str], line: bytes, expected: str) -> re.Match[str]:
    match = form.fullmatch(line.decode("ascii", "replace"))
    if match is None:
        raise HandshakeError(f"expected {expected}, got {line[:40]!r}")
    return match


class RankHandshake:
    """Take a rank's side: `hello`, then `answer` to the challenge, then `check_welcome`."""

    def __init__(self, secret: bytes, rank: int) -> None:
        self._secret, self._rank, self._nonce = secret, rank, secrets.token_hex(16)

    def hello(self) -> bytes:
        """Return the first line."""
        return f"{VERSION} hello {self._rank} {self._nonce}\n".encode()

    def answer(self, challenge: bytes) -> bytes:
        """Return the second line, once the monitor has proved itself."""
        nonce, proof = match_line(_CHALLENGE, challenge, "a challenge").groups()
        if not hmac.compare_digest(
            proof, compute_proof(self._secret, MONITOR, self._rank, self._nonce, nonce)
        ):
            raise HandshakeError("another secret")
        proof = compute_proof(self._secret, RANK, self._rank, self._nonce, nonce)
        return f"{VERSION} answer {proof}\n".encode()

    def check_welcome(self, line: bytes) -> None:
        """Raise HandshakeError unless this is the welcome."""
        match_line(_WELCOME, line, "a welcome")


def authenticate(connection: socket.socket, secret: bytes, rank: int, timeout_s: float) -> None:
    """Pass the handshake as a rank, within `timeout_s` in all, however slowly the other side answers.

    Raises:
        HandshakeError: the other side is not this job's monitor.
        OSError: the connection ended, or the time is over.
    """
    deadline = time.monotonic() + timeout_s
    connection.settimeout(timeout_s)
    mine = RankHandshake(secret, rank)
    connection.sendall(mine.hello())
    connection.sendall(mine.answer(_read_line(connection, deadline)))
    mine.check_welcome(_read_line(connection, deadline))


def _read_line(connection: socket.socket, deadline: float) -> bytes:
    """Read byte by byte: what follows the welcome belongs to somebody else."""
    line = bytearray()
    while len(line) < HANDSHAKE_LINE_BYTES:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("no answer in time")
        connection.settimeout(left_s)
        byte = connection.recv(1)
        if not byte:
            raise ConnectionError("closed without an answer")
        if byte == b"\n":
            return bytes(line)
        line += byte
    raise HandshakeError(f"expected a line, got {bytes(line[:40])!r} and no end of it")
