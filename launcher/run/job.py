"""Describe what goes into an engine: a `Job`, which is data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..cluster.cluster import LOOPBACK, Cluster
from .invocation import RANK_MODULE, SECRET_VARIABLE, own_programs_first
from .run_folder import FOLDER_VARIABLE

# One thread for each rank: ranks on a CPU share its cores, and torch takes all of them by default.
_DEVICE_ENVIRONMENT: dict[str, dict[str, str]] = {
    "auto": {},
    "cpu": {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
    "cuda": {"DS_ACCELERATOR": "cuda"},
}


@dataclass(frozen=True)
class Job:
    """Hold a cluster with what one launch adds to it."""

    cluster: Cluster
    node_rank: int
    port: int
    folder: Path  # for files that live as long as the run
    caller_environment: Mapping[str, str]
    extra_args: tuple[str, ...] = ()
    secret: str | None = None
    attempt_folder: Path | None = None  # RUN/attempt-N; None where the YAML names no run_folder

    @property
    def master_address(self) -> str:
        """Return where rank 0 listens: as written, or else this machine, or else the first host."""
        by_name = LOOPBACK if self.cluster.is_local else self.cluster.hosts[0].name
        return self.cluster.master_address or by_name

    @property
    def environment(self) -> dict[str, str]:
        """Return what the ranks get on top of the caller's: the device's defaults, the YAML's, the secret."""
        secret = {} if self.secret is None else {SECRET_VARIABLE: self.secret}
        run = {} if self.attempt_folder is None else {FOLDER_VARIABLE: str(self.attempt_folder)}
        return {**_DEVICE_ENVIRONMENT[self.cluster.device], **self.cluster.environment, **secret, **run}

    @property
    def rank_module(self) -> list[str]:
        """Return the module that runs the script in each rank, if one does: rank.py keeps logs and faults."""
        return [] if self.attempt_folder is None else [RANK_MODULE]

    @property
    def private(self) -> frozenset[str]:
        """Return names of variables whose values are shown to nobody: the YAML's, and the secret."""
        return frozenset({*self.cluster.environment, SECRET_VARIABLE})

    @property
    def script_command(self) -> list[str]:
        """Return the script and its arguments, the way DeepSpeed scripts expect them."""
        config = ["--deepspeed", "--deepspeed_config", str(self.cluster.deepspeed_config)]
        return [str(self.cluster.script), *config, *self.cluster.script_args, *self.extra_args]

    def with_own_programs(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Apply `own_programs_first` where this host runs it."""
        if self.cluster.starts_agents:
            return dict(environment)  # the agent there does it: this host's PATH is none of its
        return own_programs_first(environment, self.caller_environment)
