"""Keep the values of variables in a file of this host that its user alone can read, as long as a run lasts.

Run on every host of a job of mpirun's by start.py, through ssh, which encrypts: mpirun itself would send them
in clear (`-x NAME`). The request, {"path", "values"}, is a line of standard input, whose end ends the file.
Each rank reads the file before its script (engines/mpirun.py). Its name is random, so it is new.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import IO

from .probe import answer

_FLAGS = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC


def main(stdin: IO[str]) -> None:
    """Write the file, say so, and remove it at the end of standard input."""
    line = stdin.readline()
    if not line.startswith("{"):
        sys.exit("expected a request from ds-ring, got none; `ds-ring launch` starts this by itself")
    request = json.loads(line)
    path = Path(request["path"])
    try:
        path.parent.mkdir(mode=0o700)
    except FileExistsError:  # two names of one host: the other one keeps the same file
        _require_own(path.parent)
        answer({"written": str(path)})
        stdin.read()
        return
    try:
        with open(os.open(path, _FLAGS, 0o600), "w", encoding="utf-8") as file:
            json.dump(request["values"], file)
        answer({"written": str(path)})
        stdin.read()
    finally:
        path.unlink(missing_ok=True)
        path.parent.rmdir()


def read_environment(path: str) -> dict[str, str]:
    """Return the variables in the file of this host.

    Raises:
        SystemExit: it is another user's, or none.
    """
    try:
        _require_own(Path(path).parent)
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), encoding="utf-8") as file:
            values: dict[str, str] = json.load(file)
    except (OSError, ValueError) as error:
        sys.exit(f"expected the environment that ds-ring has written to {path} on this host, got: {error}")
    return values


def _require_own(folder: Path) -> None:
    status = folder.lstat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o77:
        sys.exit(f"{folder}: expected a folder of this user alone, got one of user {status.st_uid}")


if __name__ == "__main__":
    main(sys.stdin)
