"""Describe the input of an engine, a `Job`, and its output, an `Invocation`: both are data.

The agent on another host imports this file: it imports nothing of ds_ring that takes time, and no torch.
"""

from __future__ import annotations

import fnmatch
import os
import resource
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from .run_folder import FOLDER_VARIABLE

if TYPE_CHECKING:
    from ..cluster.cluster import Cluster

# Stands for a folder that is made where the ranks start: by the agent of a host, or by a dry run's script. No
# path of a real file begins with it.
FOLDER = Path("/ds-ring-agent-folder")
_SHELL_FOLDER = "ds_ring_folder"
LOOPBACK, LOOPBACK_6 = "127.0.0.1", "::1"
RANK_SCRIPT = Path(__file__).with_name("rank_script.py")  # runs the script in each rank
ENVIRONMENT_FILE = "DS_RING_ENVIRONMENT_FILE"  # of a rank of mpirun's: its private variables, on its host
SECRET_VARIABLE = "DS_RING_SECRET"  # the launcher gives it to every rank, a new one for each launch


def own_programs_first(environment: Mapping[str, str], around: Mapping[str, str]) -> dict[str, str]:
    """Return `environment` with this Python's programs first on PATH, as if it were activated."""
    # ninja and mpirun are such programs, and they are looked up by name. The rest of PATH is that of
    # `environment`, or else of `around`.
    programs = str(Path(sys.executable).parent)
    search_path = environment.get("PATH", around.get("PATH", os.defpath))
    if search_path.split(os.pathsep)[0] != programs:
        search_path = programs + os.pathsep + search_path
    return {**environment, "PATH": search_path}


@dataclass(frozen=True)
class Invocation:
    """Describe a command: arguments, additions to the caller's environment, files to write first."""

    argv: list[str]
    environment: dict[str, str]
    files: dict[Path, str] = field(default_factory=dict)
    programs: dict[str, str] = field(default_factory=dict)  # needed on PATH -> what to do without it
    private: frozenset[str] = frozenset()  # variables whose values are never shown
    by_file: dict[str, str] = field(default_factory=dict)  # that every host gets in a file of its own
    unset: tuple[str, ...] = ()  # patterns of variables of the caller's that the engine does not get
    end_signal: int | None = None  # that makes the engine end its ranks in their own time

    def as_shell(self) -> str:
        """Return the same as a shell script, with the names of private variables and not their values."""
        names = "|".join(self.unset).replace("*", "[A-Za-z_0-9]*")
        lines = [_UNSET.format(names=names)] if names else []
        if FOLDER_VARIABLE in self.environment:
            lines.append(f"mkdir -p {_quoted(self.environment[FOLDER_VARIABLE])}")
        if self.files:  # in a folder that no other user can write to ([Note: planted links])
            lines.append(f'{_SHELL_FOLDER}="$(mktemp -d "${{TMPDIR:-/tmp}}/ds-ring-XXXXXXXX")" || exit')
        lines += [_here_document(path, text) for path, text in self.files.items()]
        lines += [
            _private_line(name) if name in self.private else f"export {name}={_quoted(value)}"
            for name, value in sorted(self.environment.items())
        ]
        if self.by_file:
            lines.append(f"# ds-ring writes {', '.join(sorted(self.by_file))}, as JSON,")
            lines.append("# into a file of mode 0600 on each host by ssh, and names it here")
            lines.append(f': "${{{ENVIRONMENT_FILE}?}}"; export {ENVIRONMENT_FILE}')
        return "\n".join([*lines, f"exec {' '.join(map(_quoted, self.argv))}"])


def _here_document(path: Path, text: str) -> str:
    """Return the lines of a shell script that write a file; a line of it may be EOF, as a host's name."""
    end = "EOF"
    while end in text.splitlines():
        end += "_"
    return f"cat > {_quoted(str(path))} <<'{end}'\n{text}{end}"


def _quoted(word: str) -> str:
    """Return a word of a shell script, FOLDER in it as the shell's variable."""
    parts = (shlex.quote(part) if part else "" for part in word.split(str(FOLDER)))
    return f'"${_SHELL_FOLDER}"'.join(parts) or "''"


_UNSET = 'for name in $(env | sed -nE "s/^({names})=.*/\\1/p"); do unset "$name"; done'


def _private_line(name: str) -> str:
    """Return a line of a shell script that wants the variable from its caller, or makes the secret."""
    if name == SECRET_VARIABLE:
        make = shlex.join([sys.executable, "-c", "import secrets; print(secrets.token_hex(32))"])
        return f'export {name}="$({make})"'
    return f': "${{{name}?export it first: its value stands under environment in the YAML}}"; export {name}'


# Of the caller's environment, what ranks on other hosts get: settings of libraries, by the beginning of their
# names (README.md has the list). Those of one host (PATH, HOME, CUDA_VISIBLE_DEVICES) stay there.
CARRIED = (
    "COMET_", "FI_", "GLOO_", "HF_", "HUGGING_FACE_", "LD_LIBRARY", "MLFLOW", "MV2", "NCCL", "PYTHON",
    "TOKENIZERS_", "TORCH_", "TRANSFORMERS_", "UCX", "WANDB_", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY",
    "http_proxy", "https_proxy", "no_proxy",
)  # fmt: skip

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
    verbose: bool = False  # the engine's own lines, too

    @property
    def names_culprit(self) -> bool:
        """Return whether this launcher names the rank that ended a job, so that the engine need not."""
        return self.cluster.is_local or self.attempt_folder is not None

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
    def carried(self) -> dict[str, str]:
        """Return what ranks on other hosts get of the caller's environment: CARRIED, and the YAML's."""
        wanted = (*(f"{name}*" for name in CARRIED), *self.cluster.env)
        return {
            name: value
            for name, value in self.caller_environment.items()
            if any(fnmatch.fnmatchcase(name, wildcard) for wildcard in wanted)
            and not any(fnmatch.fnmatchcase(name, wildcard) for wildcard in self.cluster.starter.unset)
        }

    @property
    def private(self) -> frozenset[str]:
        """Return names of variables whose values are never shown: the YAML's, and the secret."""
        return frozenset({*self.cluster.environment, SECRET_VARIABLE})

    @property
    def script_command(self) -> list[str]:
        """Return the script and its arguments, the way DeepSpeed scripts expect them."""
        config = ["--deepspeed", "--deepspeed_config", str(self.cluster.deepspeed_config)]
        return [str(self.cluster.script), *config, *self.cluster.script_args, *self.extra_args]

    @property
    def rank_command(self) -> list[str]:
        """Return what runs in each rank: the script, by rank.py if that is to keep logs and faults."""
        keeper = [] if self.attempt_folder is None else [str(RANK_SCRIPT)]
        return [*keeper, *self.script_command]

    def with_own_programs(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Apply `own_programs_first` where this host runs it."""
        if self.cluster.starts_agents:
            return dict(environment)  # the agent there does it: this host's PATH is none of its
        return own_programs_first(environment, self.caller_environment)


# The host of rank 0 has a connection to every rank, so a run opens more files than the usual limit allows.
# Not the hard limit itself, which may be a thousand million: some programs close every number below it.
_FILES = 65536


def module_command(module: str) -> list[str]:
    """Return the command line of a module of ours or an engine's: no module of the working folder takes
    another one's place.
    """
    if hasattr(sys.flags, "safe_path"):
        return [sys.executable, "-P", "-u", "-m", module]
    # Python 3.10 has no -P: the working folder leaves the path before anything is imported from it
    start = f"import sys; del sys.path[0]; import runpy; runpy._run_module_as_main({module!r})"
    return [sys.executable, "-u", "-c", start]


def open_standard_streams() -> None:
    """Open /dev/null for standard input, output and errors where the parent process closed them.

    Otherwise the next file that is opened would have their numbers.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it gets the lowest free number
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115  as long as the process
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115


def raise_file_limit() -> None:
    """Raise the limit of open files (`ulimit -n`, often 1,024) to the hard one, 65,536 at most."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return
    wanted = _FILES if hard == resource.RLIM_INFINITY else min(hard, _FILES)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
