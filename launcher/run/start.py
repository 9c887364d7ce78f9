"""Start one attempt of a job, by its engine, here or on all hosts, and wait for its end."""

from __future__ import annotations

import os
from dataclasses import replace

from ..cluster import checks
from ..engines import engines
from . import agent, process, remote
from .attempts import few
from .invocation import Invocation
from .job import Job


def start(job: Job, signals: list[int]) -> int:
    """Run the job to its end; return the exit status, 128 + n where signal n ended it.

    Args:
        job: what to start.
        signals: signals that this process has got; a new one ends the job.
    """
    cluster = job.cluster
    hosts = "this machine" if cluster.is_local else few([host.name for host in cluster.hosts])
    said = f"{cluster.world_size} processes on {hosts} by {cluster.engine}, master port {job.port}"
    search_path = job.caller_environment.get("PATH", os.defpath)
    script = str(cluster.script)
    if cluster.starts_agents:
        checks.require_program("ssh", search_path, remote.SSH_ADVICE)
        invocations = on_each_host(job)
        process.say(said)
        return remote.run(invocations, cluster.ssh_port, script, signals, cluster.grace_seconds)
    invocation = engines.build(job)
    for program, advice in invocation.programs.items():
        checks.require_program(program, invocation.environment["PATH"], advice)
    process.say(said)
    grace = process.Grace(cluster.grace_seconds)
    return process.run(invocation, job.caller_environment, script, signals, grace)


def on_each_host(job: Job) -> dict[str, Invocation]:
    """Return what an agent on each host is told to run."""
    variables = remote.carried(job.caller_environment)
    there = replace(job, folder=agent.FOLDER, caller_environment=variables)
    made = [engines.build(replace(there, node_rank=rank)) for rank in range(len(job.cluster.hosts))]
    return {
        host.name: replace(one, environment={**variables, **one.environment})
        for host, one in zip(job.cluster.hosts, made, strict=True)
    }
