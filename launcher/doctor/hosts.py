"""Examine every host of a cluster: through ssh or srun, or where each host has a call of its own.

Owns how answers come together; what a host examines is doctor/probe.py's, what the answers mean is
doctor/findings.py's.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import threading
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from ..cluster.cluster import Cluster
from ..run.job import Job
from ..run.presence import AskedHost, ask_hosts
from . import probe

MEETING_SECONDS = 20.0  # in which all hosts must have answered, by default
_LOOK_SECONDS = 0.1
_IMPORT_SECONDS, _END_SECONDS = 5.0, 2.0
_OF_ONE_HOST = ("environment", "script", "deepspeed_config")  # may differ, or are compared otherwise


@dataclass
class HostAnswers:
    """Hold the answers of all hosts.

    Attributes:
        answers: host name -> its findings.
        missing: host name -> why there is no answer.
        ways: host name -> the address and interface by which it reached the master.
        seen: host name -> folder -> numbers of the hosts whose marks it saw there.
    """

    answers: dict[str, dict[str, Any]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    ways: dict[str, tuple[str, str]] = field(default_factory=dict)
    seen: dict[str, dict[str, list[int]]] = field(default_factory=dict)


def request_for(job: Job, index: int, token: str) -> dict[str, Any]:
    """Return the request to a host; `token` is that of one call of the doctor."""
    cluster = job.cluster
    folders = [] if cluster.run_folder is None else [str(cluster.run_folder)]
    if cluster.relaunch is not None:
        folders.append(str(cluster.relaunch.checkpoints))
    return {
        "host": cluster.hosts[index].name,
        "index": index,
        "token": token,
        "names": [host.name for host in cluster.hosts] if cluster.reaches_out else [job.master_address],
        "environment": dict(cluster.environment),
        "is_master": index == 0,
        "master": job.master_address,
        "port": job.port,
        "cluster": _described(cluster),
        "files": {"script": str(cluster.script)},
        "config": str(cluster.deepspeed_config),
        "folders": folders,
    }


def _described(cluster: Cluster) -> dict[str, str]:
    """Return the YAML's keys as text; values of variables as digests, since they may be secret."""
    keys = {
        name: json.dumps(value, default=str)
        for name, value in cluster.model_dump(mode="json").items()
        if name not in _OF_ONE_HOST
    }
    for name in cluster.environment.keys() - set(probe.INTERFACE_VARIABLES):
        value = cluster.environment[name]
        keys[f"environment.{name}"] = hashlib.sha256(value.encode()).hexdigest()[:12]
    return keys


def ask(job: Job, seconds: float = MEETING_SECONDS) -> HostAnswers:
    """Return what all hosts say, in at most so many seconds and a little."""
    if job.cluster.is_local:
        request = request_for(job, 0, uuid.uuid4().hex)
        hosts = HostAnswers({request["host"]: probe.examine(request)})
        probe.remove_marks(request)
        return hosts
    return _from_here(job, seconds) if job.cluster.reaches_out else _meet(job, seconds)


def _from_here(job: Job, seconds: float) -> HostAnswers:
    """Ask all hosts at once."""
    cluster, token = job.cluster, uuid.uuid4().hex
    presence = ask_hosts(cluster, seconds / 2)
    hosts = HostAnswers(missing=dict(presence.missing), ways=dict(presence.interfaces))
    hosts_asked = {
        host.name: AskedHost(cluster, host.name, "ds_ring_launcher.doctor.probe") for host in presence.hosts
    }
    deadline = time.monotonic() + seconds / 2
    try:
        for index, host in enumerate(cluster.hosts):
            if host.name in hosts_asked:
                hosts_asked[host.name].ask(request_for(job, index, token))
        for name, asking in hosts_asked.items():
            answer = asking.answer(deadline)
            if answer is None:
                hosts.missing[name] = f"its examination did not end: {asking.silence(seconds / 2)}"
            else:
                hosts.answers[name] = answer
        for asking in hosts_asked.values():
            asking.ask({"look": True})
        for name, asking in hosts_asked.items():
            hosts.seen[name] = (asking.answer(deadline) or {"seen": {}})["seen"]
    finally:
        for asking in hosts_asked.values():
            asking.end(_END_SECONDS)  # it removes its mark first
    return hosts


# [Note: a meeting without ssh]
# With ssh: false ds-ring is called on every host. The calls meet at the master's address and port, where
# training would meet as well, in torch's own TCPStore: so a port that is closed, an address of another
# machine and a host that never came are found by what they would break.
def _meet(job: Job, seconds: float) -> HostAnswers:
    names, node_rank = [host.name for host in job.cluster.hosts], job.node_rank
    request = request_for(job, node_rank, f"port{job.port}")
    answer = probe.examine(request)
    hosts = HostAnswers({names[node_rank]: answer})
    if answer.get("port_holder"):
        return hosts  # no meeting is possible here
    try:
        _exchange(job, request, hosts, seconds)
    except (RuntimeError, ValueError) as error:
        why = str(error).splitlines()[0].split(" Exception raised")[0][:200]
        where = f"{job.master_address}, port {job.port}"
        hosts.missing[names[0]] = f"the meeting with it at {where} failed: {why}"
    probe.remove_marks(request)
    return hosts


def _exchange(job: Job, request: dict[str, Any], hosts: HostAnswers, seconds: float) -> None:
    """Exchange answers with all hosts, through a store at the master's address; fill `found`."""
    names, node_rank = [host.name for host in job.cluster.hosts], job.node_rank
    store = _store(job, seconds)
    deadline = time.monotonic() + seconds  # torch has been imported by now
    store.set(f"answer{node_rank}", json.dumps(hosts.answers[names[node_rank]]))
    for index in _wait(store, "answer", range(len(names)), deadline):
        hosts.answers[names[index]] = json.loads(store.get(f"answer{index}"))
    for name in names:
        if name not in hosts.answers:
            hosts.missing[name] = f"did not come to {job.master_address}, port {job.port}"
    store.set(f"seen{node_rank}", json.dumps(probe.look(request)))
    present = [index for index, name in enumerate(names) if name in hosts.answers]
    for index in _wait(store, "seen", present, deadline + 3):
        hosts.seen[names[index]] = json.loads(store.get(f"seen{index}"))["seen"]
    store.set(f"done{node_rank}", "")
    if node_rank == 0:  # the store ends with this process
        _wait(store, "done", present, deadline + 5)


def _store(job: Job, seconds: float) -> Any:
    """Return the store of the meeting; a silent stranger at that port is dropped at the deadline."""
    import torch  # noqa: F401  # seconds: only where it is needed, and before the deadline begins
    from torch._C._distributed_c10d import TCPStore

    future: Future[Any] = Future()
    timeout = datetime.timedelta(seconds=seconds)
    where = (job.master_address, job.port)

    def make() -> None:
        try:
            future.set_result(TCPStore(*where, None, job.node_rank == 0, timeout, wait_for_workers=False))
        except (RuntimeError, ValueError) as error:
            future.set_exception(error)

    threading.Thread(target=make, daemon=True).start()  # no executor: that would wait for it at the end
    try:
        return future.result(seconds + _IMPORT_SECONDS)
    except TimeoutError:
        raise RuntimeError("something else is there, which says nothing") from None


def _wait(store: Any, what: str, wanted: Sequence[int], deadline: float) -> list[int]:
    """Return for which hosts a key is there, at the latest at the deadline."""
    while True:
        there = [index for index in wanted if store.check([f"{what}{index}"])]
        if len(there) == len(wanted) or time.monotonic() > deadline:
            return there
        time.sleep(_LOOK_SECONDS)
