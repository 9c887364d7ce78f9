"""The engine `deepspeed`: DeepSpeed's own launcher, told everything that it would otherwise guess."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping

from ds_ring.errors import RingConfigError

from .cluster import Cluster
from .job import Invocation, Job

_DEVICES = "CUDA_VISIBLE_DEVICES"
_SSH_ADVICE = "install an ssh client, or set ssh: false and start ds-ring on every host with --node-rank"
_PDSH_ADVICE = "install pdsh, which DeepSpeed starts hosts with, or set ssh: false and use --node-rank"


def deepspeed(job: Job) -> Invocation:
    """DeepSpeed's launcher, by its module: its script need not be on PATH.

    Always with a hostfile: without one it reads /job/hostfile where that exists, and trains locally with a
    warning where it does not. `--no_ssh` makes a hostfile of one line a plain local run.
    """
    cluster = job.cluster
    hostfile, environment_file = job.folder / "hostfile", job.folder / "environment"
    slots, include = _slots(job)
    files = {hostfile: "".join(f"{name} slots={count}\n" for name, count in slots.items())}
    environment, programs = job.environment, {}
    argv = [sys.executable, "-m", "deepspeed.launcher.runner"]
    argv += [f"--hostfile={hostfile}", f"--master_port={job.port}", *include]
    if cluster.reaches_out:
        argv += _over_ssh(cluster)
        files[environment_file] = _environment_text(environment)
        environment = {**environment, "DS_ENV_FILE": str(environment_file)}
        programs = {"ssh": _SSH_ADVICE} | ({} if _names_a_launcher(cluster) else {"pdsh": _PDSH_ADVICE})
    else:
        argv += ["--no_ssh", f"--node_rank={job.node_rank}", f"--master_addr={job.master_address}"]
    argv += [*cluster.engine_args, *job.script_command]
    return Invocation(argv, job.with_own_programs(environment), files, programs)


def _over_ssh(cluster: Cluster) -> list[str]:
    # Without an address DeepSpeed asks the first host for its own (`hostname -I`).
    argv = [f"--master_addr={cluster.master_address}"] if cluster.master_address else []
    argv += [f"--ssh_port={cluster.ssh_port}"] if cluster.ssh_port is not None else []
    return argv + (["--force_multi"] if len(cluster.hosts) == 1 else [])


def _names_a_launcher(cluster: Cluster) -> bool:
    return any(argument.split("=")[0] == "--launcher" for argument in cluster.engine_args)


def _environment_text(environment: Mapping[str, str]) -> str:
    """The text of a `.deepspeed_env`, the one way in which DeepSpeed carries variables to other hosts."""
    for name, value in environment.items():
        # DeepSpeed puts double quotes around anything else: a remote shell would expand inside them, and
        # mpirun, which asks no shell, would keep them as part of the value. pdsh replaces %h and %n.
        if re.search(r"[^\w@+=:,./-]", value, re.ASCII):
            raise RingConfigError(
                f"environment.{name}: expected letters, digits and _@+=:,./- only, got {value!r}; "
                "DeepSpeed cannot carry other characters to other hosts unchanged: set it on the hosts"
            )
    return "".join(f"{name}={value}\n" for name, value in environment.items())


def _slots(job: Job) -> tuple[dict[str, int], list[str]]:
    """Slots for the hostfile, and an `--include` where this host is to use other devices than its first ones.

    DeepSpeed overwrites CUDA_VISIBLE_DEVICES with 0, 1, 2, ... unless `--include` says the same, and it
    checks the numbers there against the hostfile's slots.
    """
    slots = {host.name: host.slots for host in job.cluster.hosts}
    own = job.cluster.hosts[job.node_rank]
    devices = _visible_devices(job, own.slots)
    if devices == list(range(own.slots)):
        return slots, []
    chosen = {
        name: f"{own.name}:{','.join(map(str, devices))}" if name == own.name else name for name in slots
    }
    return {**slots, own.name: max(devices) + 1}, [f"--include={'@'.join(chosen.values())}"]


def _visible_devices(job: Job, slots: int) -> list[int]:
    """The numbers of the devices that this host's processes take, in order."""
    text = job.environment.get(_DEVICES, job.caller_environment.get(_DEVICES, ""))
    if job.cluster.device == "cpu" or job.cluster.reaches_out or not text:
        return list(range(slots))
    parts = [part.strip() for part in text.split(",")]
    if len(parts) < slots or not all(part.isdecimal() for part in parts):
        raise RingConfigError(
            f"{_DEVICES}: expected at least {slots} device numbers, one for each slot, got {text!r}; "
            "unset it, or make slots fit it"
        )
    return [int(part) for part in parts[:slots]]
