"""Starts the monitors of the harness's ranks: forks of one small process, where `start_monitor` starts a Python each.

Owns that process, which has imported the monitor: a mesh costs 50 ms less. What a monitor does is ds_ring's own
(`health/failure_detector`); that ds_ring starts one is tested by tests/unit/health/test_joining.py and by all ranks that
are not the harness's (test_faults.py, test_strangers.py, `ds-ring launch`).

    python -I -S tests/dist/monitors.py FOLDER_OF_THE_MONITOR < pipe      # ends when the pipe is closed
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import json
import os
import selectors
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_TIMEOUT_S = 60.0


def serve(folder: str) -> None:
    """Print an address, and fork a monitor for each line of settings that comes there."""
    spec = importlib.util.spec_from_file_location("failure_detector", Path(folder, "__init__.py"))
    sys.modules["failure_detector"] = importlib.util.module_from_spec(spec)
    monitor = importlib.import_module("failure_detector.server")
    with socket.socket(socket.AF_UNIX) as listener, selectors.DefaultSelector() as selector:
        listener.bind("")  # Linux chooses a name, for which there is no file
        listener.listen(64)
        print(listener.getsockname().decode("latin-1")[1:], flush=True)
        selector.register(listener, selectors.EVENT_READ)
        selector.register(0, selectors.EVENT_READ)
        while 0 not in {key.fd for key, _ in selector.select()}:
            with listener.accept()[0] as connection:
                settings = connection.makefile().readline()
                pid = os.fork()
                if not pid:
                    os.dup2(connection.fileno(), 1)
                    for local in (connection, listener, selector):
                        local.close()
                    sys.stdin = io.StringIO(settings)
                    monitor.main()  # prints the port, forks once more, and ends this one
                os.waitpid(pid, 0)


class Monitors:
    """The process, as its parent and the parent's forks see it.

    Args:
        folder: of the monitor.
        otherwise: `start_monitor` itself, which says what is wrong where no fork answers.
    """

    def __init__(self, folder: str, otherwise: Callable[[str, int, float, str], int]) -> None:
        command = [sys.executable, "-I", "-S", __file__, folder]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._process = process  # whose pipe every fork holds
        self._otherwise = otherwise
        self._address = b"\0" + process.stdout.readline().strip()

    def start(self, host: str, world_size: int, heartbeat_timeout_s: float, secret: str) -> int:
        """Start a monitor as `start_monitor` of ds_ring/health/joining.py does; return its port."""
        settings: dict[str, Any] = {"host": host, "world_size": world_size, "secret": secret}
        settings |= {"heartbeat_timeout_s": heartbeat_timeout_s}
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(_TIMEOUT_S)
            connection.connect(self._address)
            connection.sendall(json.dumps(settings).encode() + b"\n")
            port = connection.makefile().readline()
        return int(port) if port else self._otherwise(host, world_size, heartbeat_timeout_s, secret)

    def close(self) -> None:
        """End the process; monitors go on until their ranks are gone."""
        self._process.stdin.close()
        self._process.wait(_TIMEOUT_S)


if __name__ == "__main__":
    serve(sys.argv[1])
