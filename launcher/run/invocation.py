"""Describe what an engine makes: a command line, variables of the environment, files. Light to import.

The agent on another host and the guardian import it: nothing of ds_ring, so no torch.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from .run_folder import FOLDER_VARIABLE

RANK_MODULE = "ds_ring_launcher.run.rank"  # runs the script in each rank, where there is a run_folder
SECRET_VARIABLE = "DS_RING_SECRET"  # the launcher gives it to every rank, a new one for each launch


def own_programs_first(environment: Mapping[str, str], around: Mapping[str, str]) -> dict[str, str]:
    """Return `environment` with this Python's programs first on PATH, as if it were activated."""
    # ninja and mpirun are such programs, and they are looked up by name. The rest of PATH is that of
    # `environment`, or else of `around`.
    own = str(Path(sys.executable).parent)
    search_path = environment.get("PATH", around.get("PATH", os.defpath))
    if search_path.split(os.pathsep)[0] != own:
        search_path = own + os.pathsep + search_path
    return {**environment, "PATH": search_path}


@dataclass(frozen=True)
class Invocation:
    """Describe what to run: arguments, what is added to the caller's environment, files to write first."""

    argv: list[str]
    environment: dict[str, str]
    files: dict[Path, str] = field(default_factory=dict)
    programs: dict[str, str] = field(default_factory=dict)  # needed on PATH -> what to do without it
    private: frozenset[str] = frozenset()  # variables whose values are shown to nobody
    end_signal: int | None = None  # that makes the engine end its ranks in their own time

    def as_shell(self) -> str:
        """Return the same as a shell script, with the names of private variables and not their values."""
        lines = []
        if FOLDER_VARIABLE in self.environment:
            lines.append(f"mkdir -p {shlex.quote(self.environment[FOLDER_VARIABLE])}")
        for path, text in self.files.items():
            lines.append(f"mkdir -p {shlex.quote(str(path.parent))}")
            lines.append(f"cat > {shlex.quote(str(path))} <<'EOF'\n{text}EOF")
        lines += [
            _private_line(name) if name in self.private else f"export {name}={shlex.quote(value)}"
            for name, value in sorted(self.environment.items())
        ]
        return "\n".join([*lines, f"exec {shlex.join(self.argv)}"])


def _private_line(name: str) -> str:
    """Return a line of a shell script that wants the variable from its caller, or makes the secret."""
    if name == SECRET_VARIABLE:
        make = shlex.join([sys.executable, "-c", "import secrets; print(secrets.token_hex(32))"])
        return f'export {name}="$({make})"'
    return f': "${{{name}?export it first: its value stands under environment in the YAML}}"; export {name}'
