"""The handshake: both sides prove the secret, nothing else gets through, a slow other side ends in time."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from ds_ring.health.failure_detector.admission import DetectorHandshake
from ds_ring.health.failure_detector.handshake import HandshakeError, RankHandshake, _read_line, authenticate

SECRET = b"a secret of the length that it must have"


def both(rank_secret: bytes = SECRET, monitor_secret: bytes = SECRET, rank: int = 1) -> DetectorHandshake:
    """A handshake to its end, in memory."""
    monitor, mine = DetectorHandshake(monitor_secret, 4), RankHandshake(rank_secret, rank)
    challenge = monitor.take(mine.hello().rstrip(b"\n")).rstrip(b"\n")
    mine.check_welcome(monitor.take(mine.answer(challenge).rstrip(b"\n")).rstrip(b"\n"))
    return monitor


def test_who_knows_the_secret_is_let_in_as_its_rank() -> None:
    monitor = both(rank=3)
    assert monitor.done and monitor.rank == 3


def test_a_rank_does_not_answer_a_monitor_that_does_not_know_the_secret() -> None:
    with pytest.raises(HandshakeError, match="another secret"):
        both(monitor_secret=b"another one")


def test_the_secret_is_in_no_line() -> None:
    monitor, mine = DetectorHandshake(SECRET, 4), RankHandshake(SECRET, 1)
    lines = [mine.hello()]
    lines.append(monitor.take(lines[-1].rstrip(b"\n")))
    lines.append(mine.answer(lines[-1].rstrip(b"\n")))
    assert not any(SECRET in line or SECRET.hex().encode() in line for line in lines)


def test_an_answer_serves_one_connection_and_one_rank() -> None:
    monitor, mine = DetectorHandshake(SECRET, 4), RankHandshake(SECRET, 1)
    answer = mine.answer(monitor.take(mine.hello().rstrip(b"\n")).rstrip(b"\n")).rstrip(b"\n")
    for hello in (mine.hello(), mine.hello().replace(b"hello 1", b"hello 2")):
        again = DetectorHandshake(SECRET, 4)
        again.take(hello.rstrip(b"\n"))
        with pytest.raises(HandshakeError, match="another secret"):
            again.take(answer)
        assert not again.done
    monitor.take(answer)
    assert monitor.done


def test_a_challenge_for_another_rank_is_not_answered() -> None:
    """Somebody between them changes the rank of the first line."""
    monitor, mine = DetectorHandshake(SECRET, 4), RankHandshake(SECRET, 1)
    challenge = monitor.take(mine.hello().replace(b"hello 1", b"hello 2").rstrip(b"\n"))
    with pytest.raises(HandshakeError, match="another secret"):
        mine.answer(challenge.rstrip(b"\n"))


def test_the_challenge_is_no_answer() -> None:
    """A stranger that sends back what it got, as its own proof."""
    monitor, mine = DetectorHandshake(SECRET, 4), RankHandshake(SECRET, 1)
    proof = monitor.take(mine.hello().rstrip(b"\n")).split()[-1]
    with pytest.raises(HandshakeError, match="another secret"):
        monitor.take(b"ds_ring/1 answer " + proof)


@pytest.mark.parametrize(
    "line",
    [
        b"", b"[" * 200, b"\xff\xfe\x00", b"GET / HTTP/1.1", b"ds_ring/1 hello 1",
        b"ds_ring/1 hello -1 " + b"0" * 32,
        b"ds_ring/1 hello 4 " + b"0" * 32, b"ds_ring/1 hello 12345678 " + b"0" * 32,
        b"ds_ring/1 hello 1 " + b"0" * 31, b"ds_ring/1 hello 1 " + b"G" * 32,
        "ds_ring/1 hello \u0661 ".encode() + b"0" * 32, b"ds_ring/2 hello 1 " + b"0" * 32,
        b"ds_ring/1 answer " + b"0" * 64,
    ],
)  # fmt: skip
def test_anything_else_is_refused(line: bytes) -> None:
    monitor = DetectorHandshake(SECRET, 4)
    with pytest.raises(HandshakeError):
        monitor.take(line)
    assert not monitor.done


@pytest.mark.parametrize("how", ["one byte at a time", "silence", "a line without an end", "closes"])
def test_a_rank_waits_for_no_imposter_longer_than_it_must(how: str) -> None:
    """One byte a second held joining up for ever."""
    tired = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                end = time.monotonic() + (0.0 if how == "closes" else 3.0)
                while time.monotonic() < end and not tired.is_set():
                    try:
                        connection.send({"silence": b"", "one byte at a time": b"x"}.get(how, b"x" * 500))
                    except OSError:
                        return
                    time.sleep(0.1)

        thread = threading.Thread(target=answer)
        thread.start()
        with socket.create_connection(listener.getsockname()) as connection:
            started = time.monotonic()
            with pytest.raises((HandshakeError, OSError)):
                authenticate(connection, SECRET, 1, timeout_s=0.5)
            assert time.monotonic() - started < 1.5
        tired.set()
        thread.join()


def test_a_line_that_is_not_there_at_the_deadline_is_not_waited_for() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(TimeoutError, match="no answer in time"):
        _read_line(ours, time.monotonic() - 1.0)
