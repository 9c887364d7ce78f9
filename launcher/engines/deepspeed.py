"""Call DeepSpeed's own launcher, and tell it everything that it would otherwise guess."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ds_ring.compat.deepspeed_launcher import takes_log_level
from ds_ring.errors import RingConfigError

from ..run.job import RANK_SCRIPT, Invocation, Job, module_command
from ..run.rank_script import FIRST, ONLY, SAFE_PATH
from .engine import Engine

if TYPE_CHECKING:
    from ds_ring.config.problems import Problem

    from ..cluster.cluster import Cluster

_DEVICES, _SAFE = "CUDA_VISIBLE_DEVICES", "PYTHONSAFEPATH"


class DeepSpeed(Engine):
    """Start the ranks of one host by DeepSpeed's launcher."""

    def invocation(self, job: Job) -> Invocation:
        """Return the call of DeepSpeed's launcher on one host, by its module: PATH does not matter."""
        # Always with a hostfile: without one it reads /job/hostfile where that exists, and else trains here
        # with a warning. `--no_ssh` makes a hostfile of one line a local run. run/start.py reaches other
        # hosts: DeepSpeed's own way (pdsh) writes the values of all variables on command lines.
        cluster = job.cluster
        hostfile = job.folder / "hostfile"
        slots, include = _slots(job)
        files = {hostfile: "".join(f"{name} slots={count}\n" for name, count in slots.items())}
        argv = module_command("deepspeed.launcher.runner")
        argv += [f"--hostfile={hostfile}", f"--master_port={job.port}", *include]
        argv += ["--no_ssh", f"--node_rank={job.node_rank}", f"--master_addr={job.master_address}"]
        # At "info" it writes the values of NCCL's variables into the log, at "error" the failed command line.
        level = "critical" if job.names_culprit and not job.verbose else "warning"
        argv += [f"--log_level={level}"] if takes_log_level() else []
        argv += cluster.engine_args
        # Its runner starts its launcher by `python -m`, in whose ranks rank_script.py ends this.
        first = sum(host.slots for host in cluster.hosts[: job.node_rank])
        only = [ONLY] if job.attempt_folder is None else []
        argv += [str(RANK_SCRIPT), f"{FIRST}{first}", *only, *job.script_command]
        environment = job.with_own_programs(job.environment)
        if not job.caller_environment.get(_SAFE):
            environment[_SAFE] = SAFE_PATH
        return Invocation(argv, environment, files, private=job.private, unset=self.unset)

    def problems(self, cluster: Cluster) -> list[Problem]:
        """Return options that would undo in DeepSpeed's launcher what ds-ring does."""
        from ds_ring.config.messages import sentence
        from ds_ring.config.problems import Problem

        text, problems = " ".join(cluster.engine_args), []
        if re.search(r"(^| )--launcher\b", text):
            advice = "remove it: ds-ring reaches hosts by ssh, and engine: mpirun by MPI"
            problems.append(Problem("engine_args", sentence("no --launcher", "one", advice)))
        logs = re.search(r"(^| )--log_level[= ](info|debug)", text)
        shown_names = sorted(name for name in cluster.environment if "NCCL" in name)
        if shown_names and (logs or not takes_log_level()):
            expected = f"a --log_level of warning or above beside environment.{shown_names[0]}"
            advice = "at info DeepSpeed writes NCCL's variables into the log: remove one of the two"
            got = logs[2] if logs else "a DeepSpeed that has no such option"
            problems.append(Problem("engine_args", sentence(expected, got, advice)))
        return problems


def _slots(job: Job) -> tuple[dict[str, int], list[str]]:
    """Return slots for the hostfile, and an `--include` where this host is to use other devices."""
    # DeepSpeed overwrites CUDA_VISIBLE_DEVICES with 0, 1, 2, ... unless `--include` has the same, and it
    # checks the numbers there against the hostfile's slots.
    slots = {host.name: host.slots for host in job.cluster.hosts}
    host_here = job.cluster.hosts[job.node_rank]
    devices = _visible_devices(job, host_here.slots)
    if devices == list(range(host_here.slots)):
        return slots, []
    chosen = {
        name: f"{host_here.name}:{','.join(map(str, devices))}" if name == host_here.name else name
        for name in slots
    }
    return {**slots, host_here.name: max(devices) + 1}, [f"--include={'@'.join(chosen.values())}"]


def _visible_devices(job: Job, slots: int) -> list[int]:
    """Return the numbers of the devices that this host's processes take, in order."""
    text = job.environment.get(_DEVICES, job.caller_environment.get(_DEVICES, ""))
    if job.cluster.device == "cpu" or not text:
        return list(range(slots))
    parts = [part.strip() for part in text.split(",")]
    if len(parts) < slots or not all(part.isdecimal() and len(part) < 6 for part in parts):
        got = f"{len(parts)}" if len(parts) < slots else "an entry that is none"
        raise RingConfigError(f"{_DEVICES}: expected at least {slots} device numbers, got {got}")
    return [int(part) for part in parts[:slots]]
