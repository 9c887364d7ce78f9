"""Start one attempt of a job, by its engine, here or on all hosts, and wait for its end."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from ..cluster import checks
from ..cluster.cluster import Cluster
from ..engines.engine import ssh_command
from . import process
from .agent import BEAT_SECONDS, END, END_AFTER_FAULT
from .culprit import find_culprit
from .job import ENVIRONMENT_FILE, FOLDER, Invocation, Job
from .presence import AskedHost, HostsMissing
from .process import FAULT_GRACE_SECONDS, POLL_SECONDS, counted, few, say


def start(job: Job, signals: list[int]) -> int:
    """Run the job to its end; return the exit status, 128 + n where signal n ended it.

    Args:
        job: what to start.
        signals: signals that this process has got; a new one ends the job.
    """
    with process.private_folder() as folder:
        return _start(replace(job, folder=folder), signals)


def _start(job: Job, signals: list[int]) -> int:
    cluster = job.cluster
    hosts = "this machine" if cluster.is_local else few([host.name for host in cluster.hosts])
    processes = counted(cluster.world_size, "process", "processes")
    text = f"{processes} on {hosts} by {cluster.engine}, master port {job.port}"
    search_path = job.caller_environment.get("PATH", os.defpath)
    script = str(cluster.script)
    if cluster.starts_agents:
        checks.require_program("ssh", search_path, cluster.starter.reach("", None, "")[1])
        invocations = on_each_host(job)
        say(text)
        return run_agents(invocations, cluster.ssh_port, script, signals, cluster.grace_seconds)
    invocation = cluster.starter.invocation(job)
    for program, advice in invocation.programs.items():
        checks.require_program(program, invocation.environment["PATH"], advice)
    say(text)
    grace, caller = process.Grace(cluster.grace_seconds), job.caller_environment
    if cluster.is_local:
        invocation = process.with_rank_marks(invocation, job.folder)
    with _environment_files(cluster, invocation) as invocation:
        status = process.run(invocation, caller, script, signals, grace, job.folder)
    if cluster.is_local:
        process.say_without_ring(status, job.folder)
        if status and not signals and job.attempt_folder is None:
            culprit = find_culprit(process.marks_folder(job.folder), cluster.hosts, status)
            known = culprit.kind != "unknown"
            say(f"error: {culprit.what if known else f'it ended with status {status}, for the reason above'}")
    return status


@contextmanager
def _environment_files(cluster: Cluster, invocation: Invocation) -> Iterator[Invocation]:
    """Keep the values of `by_file` in a file on each host ([Note: secrets on the wire]); HostsMissing where
    one does not take it.
    """
    if not invocation.by_file:
        yield invocation
        return
    path = f"/tmp/ds-ring-{secrets.token_hex(16)}/environment"  # the same on all hosts, and new
    deadline, hosts_asked = time.monotonic() + _FILE_SECONDS, dict[str, AskedHost]()
    try:
        for host in cluster.hosts:
            here = host.name in checks.own_names()
            hosts_asked[host.name] = AskedHost(
                cluster, host.name, "ds_ring_launcher.run.environment_file", here
            )
            hosts_asked[host.name].ask({"path": path, "values": invocation.by_file})
        missing = {
            name: asked_host.silence(_FILE_SECONDS)
            for name, asked_host in hosts_asked.items()
            if asked_host.answer(deadline) is None
        }
        if missing:
            names = "; ".join(f"{name}: {why}" for name, why in missing.items())
            raise HostsMissing(
                f"hosts: expected the environment to pass ssh, got {names}; allow ssh without a password"
            )
        yield replace(invocation, environment={**invocation.environment, ENVIRONMENT_FILE: path})
    finally:
        for asked_host in hosts_asked.values():
            asked_host.end(_LAST_WORDS_SECONDS)


def on_each_host(job: Job) -> dict[str, Invocation]:
    """Return the request to an agent on each host."""
    variables = job.carried
    there = replace(job, folder=FOLDER, caller_environment=variables)
    cluster = job.cluster
    invocations = [
        cluster.starter.invocation(replace(there, node_rank=rank)) for rank in range(len(cluster.hosts))
    ]
    return {
        host.name: replace(invocation, environment={**variables, **invocation.environment})
        for host, invocation in zip(cluster.hosts, invocations, strict=True)
    }


# An engine that starts only its own host is started on each host by an agent, through ssh. The agent gets its
# request on standard input, which ssh encrypts: no secret is on a command line. When the connection
# ends, the run ends.

_SSH_FAILED = 255
_FILE_SECONDS = 30.0
_LAST_WORDS_SECONDS = 2.0


def run_agents(
    hosts: Mapping[str, Invocation],
    ssh_port: int | None,
    script: str,
    signals: list[int],
    grace_seconds: float,
) -> int:
    """Run an invocation on each host; return the exit status of the first that fails, or 128 + n.

    Args:
        hosts: what each one runs.
        ssh_port: of the hosts; None for ssh's own.
        script: that the ranks run.
        signals: signals that this process has got; a new one ends the run.
        grace_seconds: which the ranks have after it.
    """
    agents: dict[str, subprocess.Popen[str]] = {}
    try:
        for host, invocation in hosts.items():
            agents[host] = subprocess.Popen(
                ssh_command(host, ssh_port), stdin=subprocess.PIPE, text=True, start_new_session=True
            )
            _tell(agents[host], _request(invocation, script, grace_seconds))
        status = _watch(agents, signals)
        if signals:
            say(f"got signal {signals[0]}; ending all processes of this run on all hosts")
            return 128 + signals[0]
        return status
    finally:
        _end(agents, signals, grace_seconds)


def _request(invocation: Invocation, script: str, grace_seconds: float) -> str:
    return json.dumps(
        {
            "argv": invocation.argv,
            "environment": invocation.environment,
            "files": {str(path): text for path, text in invocation.files.items()},
            "directory": os.getcwd(),
            "script": script,
            "grace_seconds": grace_seconds,
            "end_signal": invocation.end_signal,
            "unset": invocation.unset,
        }
    )


def _watch(agents: Mapping[str, subprocess.Popen[str]], signals: list[int]) -> int:
    """Wait until all have ended well, or one has not, or a signal came."""
    beat = time.monotonic()
    while not signals:
        ended = {host: agent.poll() for host, agent in agents.items()}
        for host, status in ended.items():
            if status:
                text = "could not reach it, or lost it" if status == _SSH_FAILED else "its part failed"
                say(f"error: {host}: ssh ended with status {status}: {text}; ending the others")
                # A negative status is that of a signal; shells add 128 to it.
                return status if status > 0 else 128 - status
        if all(status == 0 for status in ended.values()):
            return 0
        if time.monotonic() - beat > BEAT_SECONDS:
            beat = time.monotonic()
            for agent in agents.values():
                _tell(agent, "")
        time.sleep(POLL_SECONDS)
    return 0


def _end(agents: Mapping[str, subprocess.Popen[str]], signals: list[int], grace_seconds: float) -> None:
    """Ask every agent for the end of its part; ranks have their whole grace if it was a signal."""
    before = len(signals)
    for agent in agents.values():
        _tell(agent, END if signals else END_AFTER_FAULT)
        assert agent.stdin is not None
        try:
            agent.stdin.close()
        except OSError:  # what was written before has not gone: the connection is lost
            pass
    deadline = time.monotonic() + (grace_seconds if signals else FAULT_GRACE_SECONDS) + 5
    while any(agent.poll() is None for agent in agents.values()):
        if time.monotonic() > deadline or len(signals) != before:
            break
        time.sleep(POLL_SECONDS)
    for agent in agents.values():  # without a connection an agent ends its part by itself
        agent.kill()
        agent.wait()


def _tell(agent: subprocess.Popen[str], line: str) -> None:
    assert agent.stdin is not None
    try:
        print(line, file=agent.stdin, flush=True)
    except (OSError, ValueError):  # it has ended, which `_watch` sees
        pass
