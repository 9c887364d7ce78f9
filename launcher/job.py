"""What goes into an engine (`Job`) and what comes out of it (`Invocation`). Both are data."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from .cluster import LOOPBACK, Cluster

# One thread for each rank: ranks on a CPU share its cores, and torch takes all of them by default.
_DEVICE_ENVIRONMENT: dict[str, dict[str, str]] = {
    "auto": {},
    "cpu": {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
    "cuda": {"DS_ACCELERATOR": "cuda"},
}


@dataclass(frozen=True)
class Job:
    """A cluster with what one launch adds to it."""

    cluster: Cluster
    node_rank: int
    port: int
    folder: Path  # for files that live as long as the run
    caller_environment: Mapping[str, str]
    extra_args: tuple[str, ...] = ()

    @property
    def master_address(self) -> str:
        """Where rank 0 listens: as written, or else this machine, or else the first host by its name."""
        by_name = LOOPBACK if self.cluster.is_local else self.cluster.hosts[0].name
        return self.cluster.master_address or by_name

    @property
    def environment(self) -> dict[str, str]:
        """What the ranks get on top of the caller's environment: the device's defaults, then the YAML's."""
        return {**_DEVICE_ENVIRONMENT[self.cluster.device], **self.cluster.environment}

    @property
    def script_command(self) -> list[str]:
        """The script and its arguments, the way DeepSpeed scripts expect them."""
        config = ["--deepspeed", "--deepspeed_config", str(self.cluster.deepspeed_config)]
        return [str(self.cluster.script), *config, *self.cluster.script_args, *self.extra_args]

    def with_own_programs(self, environment: Mapping[str, str]) -> dict[str, str]:
        """`environment` with a PATH on which this Python's programs come first, as if it were activated.

        ninja and mpirun are such programs, and they are looked up by name.
        """
        own = str(Path(sys.executable).parent)
        search_path = environment.get("PATH", self.caller_environment.get("PATH", os.defpath))
        if search_path.split(os.pathsep)[0] != own:
            search_path = own + os.pathsep + search_path
        return {**environment, "PATH": search_path}


@dataclass(frozen=True)
class Invocation:
    """What to run: arguments, what is added to the caller's environment, files to write first."""

    argv: list[str]
    environment: dict[str, str]
    files: dict[Path, str] = field(default_factory=dict)
    programs: dict[str, str] = field(default_factory=dict)  # needed on PATH -> what to do without it

    def as_shell(self) -> str:
        """The same as a shell script."""
        lines = []
        for path, text in self.files.items():
            lines.append(f"mkdir -p {shlex.quote(str(path.parent))}")
            lines.append(f"cat > {shlex.quote(str(path))} <<'EOF'\n{text}EOF")
        lines += [f"export {name}={shlex.quote(value)}" for name, value in sorted(self.environment.items())]
        return "\n".join([*lines, f"exec {shlex.join(self.argv)}"])
