"""Who is taken for dead before the monitor runs; how ranks come to one rendezvous."""

from __future__ import annotations

import json
import logging
import os
import platform
import socket
import subprocess
import threading
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch.distributed as dist
from torch.distributed import HashStore

from ds_ring.errors import RingConfigError, RingMeshError, RingPeerError
from ds_ring.health import hosts, joining
from ds_ring.health.client import DetectorClient
from ds_ring.health.failure_detector.wire import Fault
from ds_ring.health.joining import (
    ENDED,
    START,
    Arrival,
    FirstCollective,
    MonitorAddress,
    PeerLost,
    join,
    join_detector,
    leave_on_error,
    presence,
)
from ds_ring.health.rendezvous import Rendezvous, make_loopback_listener, wait_for_ranks
from ds_ring.limits import Limit
from ds_ring.schedule.grid import Grid


def test_a_process_id_counts_on_its_host_and_in_its_namespace_alone() -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    mine, store = presence(), HashStore()
    here = mine._replace(pid=gone.pid)
    for name, second in {
        "host": here._replace(host="another"),
        "pids": here._replace(processes="other"),
    }.items():
        store.set(f"{name}/1", json.dumps(second))
        Arrival(store, name, 0, 2, START, None).check()
    store.set("here/1", json.dumps(here))
    with pytest.raises(PeerLost, match="its process ended"):
        Arrival(store, "here", 0, 2, START, None).check()


def test_a_rank_that_ended_because_it_saw_a_fault_is_not_the_fault() -> None:
    """It wrote the fault between our look at the store and our look at its process."""
    gone = subprocess.Popen(["true"])
    gone.wait()

    class Store:
        looks = 0

        def __getattr__(self, name: str) -> Any:
            return getattr(inner, name)

        def check(self, keys: list[str]) -> bool:
            result: bool = inner.check(keys)
            if keys == ["race/alarm"] and not self.looks:
                self.looks += 1
                inner.set("race/fault", json.dumps(Fault(2, "it did not come")))
                inner.set("race/alarm", "")
            return result

    inner: Any = HashStore()
    inner.set("race/1", json.dumps(presence()._replace(pid=gone.pid)))
    for rank in (0, 3):
        store: Any = Store()
        with pytest.raises(PeerLost) as raised:
            Arrival(store, "race", rank, 4, START, None).check()
        assert raised.value.fault == Fault(2, "it did not come"), rank


@pytest.mark.parametrize(
    ("error", "noticed", "failed", "left"),
    [
        (RingPeerError(0, None, 1, "it is gone"), True, 0, 0),
        (RingConfigError("a wrong key"), False, 0, 1),  # every rank raises it
        (ValueError("a bug"), False, 1, 1),
    ],
)
def test_only_a_failure_of_its_own_is_told_to_the_others_at_the_start(
    error: Exception, noticed: bool, failed: int, left: int
) -> None:
    detector = mock.Mock(spec=DetectorClient, noticed=False)
    with pytest.raises(type(error)), leave_on_error(detector):
        raise error
    assert (detector.noticed, detector.report_failure.call_count, detector.leave.call_count) == (
        noticed,
        failed,
        left,
    )


def gone_rank() -> int:
    gone = subprocess.Popen(["true"])
    gone.wait()
    return gone.pid


@pytest.mark.usefixtures("no_linger")
def test_rank_0_decides_who_ended_first() -> None:
    """Another rank that sees a death writes it down."""
    store: Any = HashStore()
    store.set("dead/2", json.dumps(presence()._replace(pid=gone_rank())))
    Arrival(store, "dead", 3, 4, START, None).check()
    assert store.check(["dead/dead"]) and store.get("dead/dead") == b"2"
    store.set("dead/2", json.dumps(presence()))  # of a host where rank 0 does not see it
    with pytest.raises(PeerLost) as raised:
        Arrival(store, "dead", 0, 4, START, None).check()
    assert raised.value.fault == Fault(2, ENDED)


class Broken:
    """A first collective that has failed."""

    def is_completed(self) -> bool:
        return True

    def wait(self) -> None:
        raise RuntimeError("Connection closed by peer")


@pytest.mark.usefixtures("no_linger")
def test_a_first_collective_that_broke_tells_who_never_came() -> None:
    store, collective = cast(Any, HashStore()), FirstCollective()
    arrival = Arrival(store, "first", 0, 2, START, collective)
    store.set("first/0", json.dumps(presence()))
    arrival.check()
    collective._work = Broken()  # type: ignore[assignment]
    arrival.check()  # it writes down what it saw, and judges when it looks again
    with pytest.raises(PeerLost) as raised:
        arrival.check()
    assert raised.value.fault == Fault(1, "its process ended before it came to where ds_ring starts")


@pytest.mark.usefixtures("no_linger")
def test_a_monitor_that_nobody_starts_is_the_fault_of_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "START_S", 0.0)
    store: Any = HashStore()
    for key in ("0", "1"):
        store.set(f"all/{key}", json.dumps(presence()))
    store.set("all/broken", "")
    store.set("all/alarm", "")
    arrival = Arrival(store, "all", 1, 2, START, None)
    with pytest.raises(PeerLost, match="it did not start the monitor process within 0 s"):
        arrival.check()


def test_a_host_without_the_files_of_linux_is_known_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: str) -> Any:
        raise FileNotFoundError(path)

    monkeypatch.setattr(joining.os, "stat", fail)
    assert presence() == (platform.node(), platform.node(), os.getpid())


def test_a_monitor_of_several_hosts_listens_where_ranks_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the name that they know the store's host by, if it leads to an address of this one."""

    def at(address: str) -> Any:
        def resolve(name: str, port: None) -> Any:
            assert name == "head"
            return [(0, 0, 0, "", (address, 0))]

        return resolve

    store: Any = SimpleNamespace(underlying_store=SimpleNamespace(underlying_store=None, host="head"))
    assert hosts.find_listening_hosts(cast(Any, HashStore())) == [""]
    monkeypatch.setattr(socket, "getaddrinfo", at("127.0.0.1"))
    assert hosts.find_listening_hosts(store) == [""]
    monkeypatch.setattr(socket, "getaddrinfo", at("192.0.2.1"))  # of documents: no interface has it
    assert hosts.find_listening_hosts(store) == [""] and hosts._is_own_address("127.0.0.1")
    monkeypatch.setattr(hosts, "_is_own_address", lambda address: address == "192.0.2.1")
    assert hosts.find_listening_hosts(store) == ["192.0.2.1", "127.0.0.1"]

    def fail(*_: Any) -> Any:
        raise OSError("unknown host")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    assert hosts.find_listening_hosts(store) == [""]


@pytest.fixture
def no_linger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "LINGER_S", 0.0)


@pytest.mark.usefixtures("no_linger")
def test_a_rank_that_does_not_come_is_warned_of_and_then_named_with_the_key(
    caplog: pytest.LogCaptureFixture,
) -> None:
    arrival = Arrival(HashStore(), "late", 0, 3, Limit(0.4, "start_timeout_seconds"), None)
    arrival.announce()
    late = r"did not come to where ds_ring starts within 0.4 s \(start_timeout_seconds\)"
    with caplog.at_level(logging.WARNING), pytest.raises(PeerLost, match=late) as raised:
        arrival.wait_for_all()
    assert raised.value.fault.rank == 1
    (warning,) = [item.getMessage() for item in caplog.records]
    assert warning.startswith("the ranks 1, 2 are late: the others have waited 0.")
    assert warning.endswith("they count as failed after 0.4 s (start_timeout_seconds)")


class LostStore:
    """The store of a host that is gone."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("Connection reset by peer\nat 7")


@pytest.mark.usefixtures("no_linger")
def test_a_store_that_is_lost_is_the_fault_of_its_host(caplog: pytest.LogCaptureFixture) -> None:
    store: Any = HashStore()
    arrival = Arrival(store, "lost", 1, 2, START, None)
    arrival.announce()
    arrival.store = LostStore()  # type: ignore[assignment]
    with pytest.raises(PeerLost, match=r"the process group's store is lost, .* Connection reset by peer$"):
        arrival.wait_for_all()
    late = Arrival(store, "lost", 1, 2, Limit(0.01, "key"), None)
    late.store = LostStore()  # type: ignore[assignment]
    with caplog.at_level(logging.WARNING), pytest.raises(PeerLost):
        raise late._tell(Fault(0, "gone"))
    assert "other ranks cannot be told" in caplog.text


@pytest.mark.parametrize(
    ("local", "published", "message"),
    [
        ("y" * 32, "x" * 32, "expected one on every rank or on none, got none on rank 0"),
        (None, None, "got one on rank 0 and none on rank 1"),
        ("y" * 32, None, r"monitor process at port \d+, got .* refused"),
    ],
    ids=["here alone", "on rank 0 alone", "nobody listens"],
)  # fmt: skip
def test_a_monitor_that_cannot_be_spoken_to_is_refused(
    local: str | None, published: str | None, message: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    store: Any = HashStore()
    store.set("ds_ring/detector/1/monitor", json.dumps(MonitorAddress(port, ["127.0.0.1"], published, 10.0)))
    with pytest.raises(RingMeshError, match=message):
        join(store, 1, 2, 10.0, secret=local)


@pytest.mark.parametrize(
    ("host", "secret", "warnings"),
    [("another", None, 1), ("another", "x" * 32, 0), (None, None, 0)],
    ids=["two hosts", "a launcher's secret", "one host"],
)
def test_two_hosts_without_a_secret_are_warned_of(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch,
    host: str | None, secret: str | None, warnings: int,
) -> None:  # fmt: skip
    store: Any = HashStore()
    second = presence() if host is None else presence()._replace(host=host, processes="other")
    store.set("ds_ring/detector/1/1", json.dumps(second))
    monkeypatch.setattr(joining, "start_monitor", lambda *_: 1)
    monkeypatch.setattr(joining, "_connect", mock.Mock())
    monkeypatch.setattr(joining, "DetectorClient", mock.Mock())
    with caplog.at_level(logging.WARNING):
        join(store, 0, 2, 10.0, secret=secret)
    results = [item.getMessage() for item in caplog.records]
    assert len(results) == warnings and all("set DS_RING_SECRET to one value" in text for text in results)


def test_a_rank_that_is_lost_while_others_join_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def lose(*_: object) -> DetectorClient:
        raise PeerLost(Fault(2, "its process ended"))

    monkeypatch.setattr(joining, "join", lose)
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", HashStore)
    with pytest.raises(RingPeerError, match="its process ended") as raised:
        join_detector(Grid(4, 4), 10.0, None, None)
    assert raised.value.peer == 2


# --- the rendezvous --------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_ranks_meet_before_the_process_group_is_made() -> None:
    port, result = free_port(), dict[int, Any]()

    def come(rank: int) -> None:
        result[rank] = wait_for_ranks(Rendezvous(rank, 2, "127.0.0.1", port, rank == 0, "0"), START)

    threads = [threading.Thread(target=come, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert None not in result.values() and len(result) == 2


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
        assert make_loopback_listener(host, port) == {}  # taken: torch says so
    listening = make_loopback_listener(host, port)
    with socket.socket(family, socket.SOCK_STREAM, fileno=listening["master_listen_fd"]) as listener:
        assert listener.getsockname()[:2] == (host, port)
    assert make_loopback_listener("node-0", port) == {}
