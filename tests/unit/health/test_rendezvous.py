"""Ranks meet before torch makes the default process group; its store listens where it should."""

from __future__ import annotations

import logging
import socket
import threading
from typing import Any

import pytest

from ds_ring.errors import RingPeerError
from ds_ring.health import joining
from ds_ring.health.joining import START
from ds_ring.health.rendezvous import Rendezvous, loopback_listener, wait_for_ranks
from ds_ring.limits import Limit


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_ranks_meet_before_the_process_group_is_made() -> None:
    port, found = free_port(), dict[int, Any]()

    def come(rank: int) -> None:
        found[rank] = wait_for_ranks(Rendezvous(rank, 2, "127.0.0.1", port, rank == 0, "0"), START)

    threads = [threading.Thread(target=come, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert None not in found.values() and len(found) == 2


def test_a_rank_that_does_not_come_before_the_process_group_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "LINGER_S", 0.0)
    limit = Limit(0.5, "start_timeout_seconds")
    alone = Rendezvous(0, 2, "127.0.0.1", free_port(), True, "0")
    with pytest.raises(RingPeerError, match=r"within 0.5 s \(start_timeout_seconds\)") as raised:
        wait_for_ranks(alone, limit)
    assert raised.value.peer == 1


def test_a_store_that_does_not_answer_is_the_fault_of_rank_0(caplog: pytest.LogCaptureFixture) -> None:
    nobody = Rendezvous(1, 2, "127.0.0.1", free_port(), False, "0")
    answer = r"its store did not answer within 1 s \(start_timeout_seconds\)"
    with caplog.at_level(logging.WARNING), pytest.raises(RingPeerError, match=answer) as raised:
        wait_for_ranks(nobody, Limit(1.0, "start_timeout_seconds"))
    assert raised.value.peer == 0 and "rank 0 is late" in caplog.text


def test_a_port_that_is_taken_is_left_for_torch_to_say() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert wait_for_ranks(Rendezvous(0, 2, "127.0.0.1", port, True, "0"), Limit(2.0, "key")) is None


@pytest.mark.parametrize(("host", "family"), [("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6)])
def test_a_store_of_one_host_listens_on_loopback_alone(host: str, family: socket.AddressFamily) -> None:
    with socket.socket(family, socket.SOCK_STREAM) as free:
        free.bind((host, 0))
        port = free.getsockname()[1]
        assert loopback_listener(host, port) == {}  # taken: torch says so
    more = loopback_listener(host, port)
    with socket.socket(family, socket.SOCK_STREAM, fileno=more["master_listen_fd"]) as listener:
        assert listener.getsockname()[:2] == (host, port)
    assert loopback_listener("node-0", port) == {}
