"""Strangers who attack a live training job, and the job: two ranks that train with DeepSpeed. Run by `zygote.py`.

Owns the attacks on the monitor process and on the process group's store. A stranger reaches both ports of
loopback and knows no secret; where it knows it (a replay), that is said.
"""

from __future__ import annotations

import json
import os
import random
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ds_ring.data.config_agreement import SECRET_VARIABLE
from ds_ring.health.failure_detector.handshake import HandshakeError, RankHandshake, authenticate
from tests.dist.faults import preload as preload_faults

HELLO = b"ds_ring/1 hello 1 " + b"0" * 32 + b"\n"
TLS_HELLO = bytes.fromhex("16030100c8010000c40303") + bytes(range(200))
LASTING_S = 1.0  # of attacks that hold on


class Target(NamedTuple):
    """What a stranger attacks. It does not know the secret, but for the replay of what it might have heard."""

    monitor: int
    store: int
    secret: str

    def connect(self, port: int | None = None) -> socket.socket:
        return socket.create_connection(("127.0.0.1", port or self.monitor), timeout=5)


def send(target: Target, data: bytes, port: int | None = None) -> bytes:
    """Send, and read what comes back for a moment; the other side may close whenever it likes."""
    answer = b""
    with suppress(OSError), target.connect(port) as connection:
        connection.sendall(data)
        connection.settimeout(0.3)
        while part := connection.recv(65536):
            answer += part
    return answer


def hold(target: Target, number: int, data: bytes) -> None:
    """Many connections at once, kept for a while."""
    held = []
    with suppress(OSError):
        for _ in range(number):
            held.append(target.connect())
            held[-1].sendall(data)
    time.sleep(LASTING_S)
    for connection in held:
        connection.close()


def one_byte_at_a_time(target: Target) -> None:
    held = [target.connect() for _ in range(50)]
    for byte in HELLO[:10]:
        for connection in held:
            with suppress(OSError):
                connection.send(bytes([byte]))
        time.sleep(LASTING_S / 10)
    for connection in held:
        connection.close()


def wrong_answer(target: Target, proof: bytes = b"f" * 64) -> None:
    with target.connect() as connection:
        connection.sendall(HELLO)
        assert b"challenge" in connection.recv(4096)
        connection.sendall(b"ds_ring/1 answer " + proof + b"\n")
        assert connection.recv(4096) == b"", "a stranger was let in"


def another_job(target: Target) -> None:
    with target.connect() as connection:
        try:
            authenticate(connection, b"another job's secret, of good length", 1, 5.0)
        except HandshakeError:
            return
    raise AssertionError("a rank of another job was let in")


def replay(target: Target) -> None:
    """What a true rank 1 said once is said again: by somebody who heard it all."""
    with target.connect() as connection:
        mine = RankHandshake(target.secret.encode(), 1)
        connection.sendall(mine.hello())
        heard = [mine.hello(), mine.answer(connection.recv(4096).rstrip(b"\n"))]
    with target.connect() as connection:
        connection.sendall(heard[0])
        assert b"challenge" in connection.recv(4096)
        connection.sendall(heard[1])
        assert connection.recv(4096) == b"", "a replayed answer was taken"


def reset_in_a_line(target: Target) -> None:
    for _ in range(50):
        connection = target.connect()
        connection.sendall(HELLO[:20])
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()


def never_read(target: Target) -> None:
    with target.connect() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        connection.settimeout(0.5)
        with suppress(OSError):
            for _ in range(10000):
                connection.sendall(HELLO)


def churn(target: Target) -> None:
    for _ in range(1500):
        target.connect().close()


def store_of(target: Target) -> dist.Store:
    """Torch's own client: nobody asks it who it is."""
    return dist.TCPStore("127.0.0.1", target.store, is_master=False, timeout=timedelta(seconds=5))


def read_the_store(target: Target) -> None:
    result = store_of(target).get("default_pg/0//ds_ring/detector/1/0")  # where rank 0 announced itself
    assert b"host" in result or result.startswith(b"["), result
    address = store_of(target)
    if address.check(["default_pg/0//ds_ring/detector/1/monitor"]):
        assert target.secret.encode() not in address.get("default_pg/0//ds_ring/detector/1/monitor")


def change_the_store(target: Target, change: str, *value: str) -> None:
    store = store_of(target)
    for key in ("monitor", "0", "1", "fault", "dead", "broken"):
        getattr(store, change)(f"default_pg/0//ds_ring/detector/1/{key}", *value)


ATTACKS: dict[str, Callable[[Target], object]] = {
    "random bytes": lambda target: send(target, random.Random(0).randbytes(100_000)),
    "60,000 brackets": lambda target: send(target, b"[" * 60_000 + b"\n"),
    "a line of 64 MB": lambda target: send(target, b"x" * (64 << 20)),
    "one byte at a time": one_byte_at_a_time,
    "1,100 connections": lambda target: hold(target, 1100, b""),
    "1,100 that say hello and no more": lambda target: hold(target, 1100, HELLO),
    "a replayed handshake": replay,
    "a wrong answer": wrong_answer,
    "a rank of another job": another_job,
    "a rank with 7 digits": lambda target: send(target, b"ds_ring/1 hello 9999999 " + b"0" * 32 + b"\n"),
    "a rank with 5,000 digits": lambda target: send(target, b"ds_ring/1 hello " + b"9" * 5000 + b"\n"),
    "a verdict from nobody": lambda target: send(target, b'{"kind": "failed", "cause": "me"}\n'),
    "TLS": lambda target: send(target, TLS_HELLO),
    "HTTP": lambda target: send(target, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"),
    "1,500 connections that close": churn,
    "a client that never reads": never_read,
    "resets in mid line": reset_in_a_line,
    "random bytes for the store": lambda target: send(target, random.Random(1).randbytes(5000), target.store),
    "reading the store": read_the_store,
    "overwriting our keys of the store": lambda target: change_the_store(
        target, "set", '[1, "a stranger says so"]'
    ),
    "deleting our keys of the store": lambda target: change_the_store(target, "delete_key"),
}


def preload(modes: list[str]) -> None:
    """Imports that every rank shares."""
    preload_faults(["deepspeed"])


def rank_main(rank: int, job: dict[str, Any]) -> None:
    """Train for `job["steps"]` steps, or until the file "stop" is there; leave every loss, to the last bit."""
    from tests.dist.deepspeed_ranks import (
        Size,
        build_batch,
        build_model,
        json_config,
        start_engine,
        take_step,
    )

    torch.set_num_threads(1)
    folder = Path(job["folder"])
    os.environ[SECRET_VARIABLE] = job["secret"]
    where = f"tcp://127.0.0.1:{job['port']}"
    dist.init_process_group("gloo", where, rank=rank, world_size=job["world_size"])
    size = Size(hidden=32, layers=1, tokens=32, samples=1)
    section = {"heartbeat_timeout_seconds": 10.0, "hop_timeout_seconds": 30.0}
    config = json_config(job["world_size"], 1, 1, ring_attention=section)
    engine = start_engine(build_model(size, "ds_ring"), config, 0.01)
    batch = build_batch(size)
    detector = engine.ring.run_mesh.detector
    assert detector is not None
    if rank == 0:
        (folder / "monitor").write_text(str(detector._connection.getpeername()[1]))
    losses: list[str] = []
    stop = torch.zeros(1)
    while not stop and len(losses) < job["steps"]:
        losses.append(take_step(engine, batch).hex())
        stop.fill_(float(rank == 0 and (folder / "stop").exists()))
        dist.all_reduce(stop)
    (folder / f"losses{rank}.json").write_text(json.dumps(losses))
