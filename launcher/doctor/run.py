"""Start the ring that `ds-ring doctor` measures, by the engine of the cluster YAML, and read what it said."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import yaml

from ..run.job import Job
from . import ring
from .findings import NOT_LOOKED_AT, WRONG, Finding, judge_ring

_JSON = {"train_batch_size": 2, "sequence_parallel_size": 2, "ring_attention": {"pattern": {"causal": True}}}
_GRACE_SECONDS = 20.0
_TOLD_LINES = 3


def own_machine(folder: Path) -> Path:
    """Return a cluster YAML for this machine alone: two ranks on its CPU."""
    (folder / "ds_config.json").write_text(json.dumps(_JSON))
    path = folder / "cluster.yaml"
    told = {
        "engine": "torchrun", "device": "cpu", "hosts": "local", "slots": 2,
        "script": str(Path(ring.__file__)), "deepspeed_config": "ds_config.json",
    }  # fmt: skip
    path.write_text(yaml.safe_dump(told))
    return path


def ring_findings(job: Job, hosts: list[Finding], seconds: float) -> list[Finding]:
    """Return the findings about the ring; none of it is started where hosts are not as they must be."""
    wrong = [finding.what for finding in hosts if finding.state == WRONG]
    if wrong:
        return [Finding("ring", NOT_LOOKED_AT, f"mend first: {', '.join(wrong)}")]
    path = job.folder / "doctor.yaml"
    path.touch(mode=0o600)  # it has the values of variables
    path.write_text(yaml.safe_dump(_cluster_of_self_test(job)))
    command = [sys.executable, "-m", "ds_ring_launcher.cli", "launch", str(path)]
    if not job.cluster.is_local and not job.cluster.reaches_out:
        command += ["--node-rank", str(job.node_rank)]
    status, said, complaints = _run(command, dict(job.caller_environment), seconds)
    line = next((one for one in said if ring.MARK in one), None)
    if status == 0 and line is not None:
        return judge_ring(json.loads(line.split(ring.MARK, 1)[1]))
    if status == 0 and job.node_rank:
        return [Finding("ring", NOT_LOOKED_AT, "rank 0's host has the findings")]
    if status is None:
        why = f"it did not end within {seconds:g} s and was ended"
    else:
        why = f"it ended with status {status}"
    return [Finding("ring", WRONG, f"the ring test failed, {why}: {_last_words(complaints)}")]


def _cluster_of_self_test(job: Job) -> dict[str, object]:
    """Return the YAML's keys with the self-test for a script."""
    cluster = job.cluster
    told: dict[str, object] = {
        "engine": cluster.engine,
        "device": cluster.device,
        "environment": {"KINETO_LOG_LEVEL": "99", **cluster.environment},  # no lines of the profiler
        "engine_args": list(cluster.engine_args),
        "script": str(Path(ring.__file__)),
        "deepspeed_config": str(cluster.deepspeed_config),
    }
    if cluster.is_local:
        return {**told, "hosts": "local", "slots": cluster.hosts[0].slots}
    told |= {"hosts": [host.model_dump() for host in cluster.hosts], "ssh": cluster.ssh}
    if cluster.run_folder is not None:  # as in the run itself, ranks then choose their interface
        told["run_folder"] = str(cluster.run_folder / "doctor")
    for name in ("ssh_port", "master_address", "master_port"):
        if getattr(cluster, name) is not None:
            told[name] = getattr(cluster, name)
    return told


def _run(
    command: list[str], environment: dict[str, str], seconds: float
) -> tuple[int | None, list[str], list[str]]:
    """Return the exit status (None: the deadline passed), and the lines of stdout and stderr."""
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, start_new_session=True,
    )  # fmt: skip
    with process:
        try:
            said, complaints = process.communicate(timeout=seconds)
            return process.returncode, said.splitlines(), complaints.splitlines()
        except subprocess.TimeoutExpired:
            process.terminate()  # the launcher ends its ranks, on all hosts
            try:
                said, complaints = process.communicate(timeout=_GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                said, complaints = process.communicate()
            return None, said.splitlines(), complaints.splitlines()
        except BaseException:
            process.terminate()
            raise


def _last_words(lines: list[str]) -> str:
    """Return the lines that say why: errors of ds_ring first, or else the last ones."""
    stripped = [line.strip() for line in lines if line.strip()]
    named = [line for line in stripped if "Error: " in line or line.startswith("ds-ring: error")]
    return (
        " / ".join(list(dict.fromkeys(named))[:_TOLD_LINES] or stripped[-_TOLD_LINES:]) or "it said nothing"
    )
