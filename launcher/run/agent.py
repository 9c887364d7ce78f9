"""Run this host's part of a run that ds-ring started by ssh, and end it with the launcher.

Standard input is the connection: a request in one line of JSON (start.py writes it), then an empty line
every few seconds. "end" asks for the end; the end of the file, or a long silence, means that the launcher or
its machine is gone. Values of variables come this way only: a command line can be read by everybody.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO, Any

from . import process
from .job import FOLDER, Invocation, own_programs_first, raise_file_limit

BEAT_SECONDS = 5.0
# So that a launcher that is stopped for a while (Ctrl-Z), or a network that is out, does not end a run.
SILENCE_SECONDS = 300.0
END, END_AFTER_FAULT = "end", "end after a fault"


def main(stdin: IO[str]) -> int:
    """Run the request of the first line; return the engine's exit status."""
    line = stdin.readline()
    # A person who starts this by hand sees words and not a traceback.
    if not line.startswith("{"):
        return _refuse("expected a request from ds-ring, got none; `ds-ring launch` starts this by itself")
    request: dict[str, Any] = json.loads(line)
    try:
        os.chdir(request["directory"])
    except OSError as error:
        return _refuse(f"expected the launcher's folder on this host, too: {error}; share it, or make it")
    if not Path(request["script"]).is_file():
        return _refuse(f"script: expected a Python file, got no {request['script']}; copy it to this host")
    raise_file_limit()
    with process.private_folder() as folder:
        invocation = process.with_rank_marks(_invocation(request, str(folder)), folder)
        grace = process.Grace(request["grace_seconds"])
        with process.signals_noted() as signals:
            threading.Thread(target=_listen, args=(stdin, grace), daemon=True).start()
            status = process.run(
                invocation, dict(os.environ), request["script"], signals, grace, folder, subprocess.DEVNULL
            )
        process.say_without_ring(status, folder)
        return status


def _invocation(request: dict[str, Any], folder: str) -> Invocation:
    argv = [argument.replace(str(FOLDER), folder) for argument in request["argv"]]
    files = {Path(name.replace(str(FOLDER), folder)): text for name, text in request["files"].items()}
    # PATH is this host's: the launcher's may have other folders.
    environment = own_programs_first(request["environment"], os.environ)
    unset, end_signal = tuple(request["unset"]), request["end_signal"]
    return Invocation(argv, environment, files, unset=unset, end_signal=end_signal)


def _listen(stdin: IO[str], grace: process.Grace) -> None:
    """Turn the end of the connection into SIGTERM for this process, which ends its run."""
    silent = threading.Timer(SILENCE_SECONDS, _end, ("heard nothing from the launcher",))
    while True:
        silent.daemon = True
        silent.start()
        line = stdin.readline()
        silent.cancel()
        word = line.strip()
        if not line or word == END_AFTER_FAULT:  # there is no checkpoint to wait for
            grace.seconds = min(
                grace.seconds, process.FAULT_GRACE_SECONDS if line else process.ORPHAN_GRACE_SECONDS
            )
        if not line or word in (END, END_AFTER_FAULT):
            _end("" if line else "lost the launcher")
            return
        silent = threading.Timer(SILENCE_SECONDS, _end, ("heard nothing from the launcher",))


def _end(why: str) -> None:
    if why:
        process.say(f"{why}; ending this host's processes")
    os.kill(os.getpid(), signal.SIGTERM)


def _refuse(what: str) -> int:
    process.say(f"error: {os.uname().nodename}: {what}")
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.stdin))
