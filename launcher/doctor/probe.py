"""Examine a host for `ds-ring doctor`: versions, devices, interfaces, names, the master's port, files.

Run on every host, here or through ssh: a line of JSON on standard input asks, a line on standard output
answers, twice. Imports the standard library and psutil: a host on which torch cannot be imported must answer.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import time
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from ..run import probe
from ..run.probe import answer

PACKAGES = ("ds_ring", "torch", "deepspeed", "numpy", "transformers", "pydantic", "mpi4py")
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_MARK = ".ds-ring-doctor-"
_LINK_SECONDS = 1.5  # Linux reports a new link once a second at most

Answer = dict[str, Any]


def examine(request: Answer) -> Answer:
    """Return what this host is. `request` is what `hosts.request_for` makes."""
    environment = {**os.environ, **request["environment"]}
    versions = {}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    answers: Answer = {
        "host": request["host"],
        "node": os.uname().nodename,
        "versions": {"python": platform.python_version(), **versions},
        "devices": _devices(),
        "interfaces": interfaces(),
        "chosen": {name: environment[name] for name in INTERFACE_VARIABLES if environment.get(name)},
        "own_address": _resolved(os.uname().nodename),  # where gloo listens if nothing is chosen
        "names": {name: _resolved(name) for name in request["names"]},
        "cluster": request["cluster"],
        "files": {name: _digest(Path(path)) for name, path in request["files"].items()},
        "config": _flat(request["config"]),
        "folders": _marked_folders(request),
    }
    if request["is_master"]:
        answers["port_holder"] = _holder(request["port"])
    else:
        answers["way"] = way_to(request["master"])
    return answers


def look(request: Answer) -> Answer:
    """Return which hosts' marks are in the folders, and remove this host's; after all have examined."""
    seen = {}
    for folder in request["folders"]:
        names = {path.name for path in Path(folder).glob(f"{_MARK}*")} if Path(folder).is_dir() else set()
        prefix = f"{_MARK}{request['token']}-"
        seen[folder] = sorted(int(name[len(prefix) :]) for name in names if name.startswith(prefix))
    return {"seen": seen}


def remove_marks(request: Answer) -> None:
    """Remove this host's mark; once every host has looked."""
    for folder in request["folders"]:
        _mark(folder, request).unlink(missing_ok=True)


def _mark(folder: str, request: Answer) -> Path:
    return Path(folder, f"{_MARK}{request['token']}-{request['index']}")


def _marked_folders(request: Answer) -> dict[str, str]:
    """Return for each folder of the run "" where a mark was left there, or why not."""
    reasons = {}
    for folder in request["folders"]:
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            _mark(folder, request).touch(exist_ok=False)  # a planted link is not followed
            reasons[folder] = ""
        except OSError as error:
            reasons[folder] = str(error.strerror or error)
    return reasons


def _devices() -> Answer:
    """Return cores, memory (bytes) and the names of NVIDIA's GPUs."""
    gpus: list[str] = []
    if shutil.which("nvidia-smi"):
        command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        with suppress(OSError, subprocess.TimeoutExpired):
            listing = subprocess.run(command, capture_output=True, text=True, timeout=10)
            gpus = listing.stdout.split("\n")[:-1] if listing.returncode == 0 else []
    return {"cores": len(os.sched_getaffinity(0)), "memory": psutil.virtual_memory().total, "gpus": gpus}


def interfaces(again: bool = True) -> dict[str, Answer]:
    """Return addresses, state and rate (Mbit/s, 0 where unknown) of each interface."""
    states = psutil.net_if_stats()
    links = {}
    for name, entries in psutil.net_if_addrs().items():
        state = states.get(name)
        is_up, mbit = (state.isup, state.speed) if state else (False, 0)
        links[name] = {"addresses": probe.internet_addresses(entries), "up": is_up, "mbit": mbit}
    if again and any(link["addresses"] and not link["up"] for link in links.values()):
        time.sleep(_LINK_SECONDS)
        return interfaces(again=False)
    return links


def _resolved(name: str) -> str | None:
    try:
        return str(socket.getaddrinfo(name, None)[0][4][0])
    except OSError:
        return None


def way_to(address: str) -> Answer:
    """Return the own address and interface from which packets to a host leave, or why there is none."""
    try:
        address_here, name = probe.way_to(address)
    except OSError as error:
        return {"address": None, "interface": None, "why": str(error.strerror or error)}
    return {"address": address_here, "interface": name, "why": ""}


def _holder(port: int) -> str | None:
    """Return the listener on a port of this host, or None."""
    try:
        with socket.create_server(("", port)):
            return None
    except OSError as error:
        why = str(error.strerror or error)
    with suppress(psutil.Error):
        for connection in psutil.net_connections("tcp"):
            if (
                connection.laddr
                and connection.laddr.port == port
                and connection.status == psutil.CONN_LISTEN
                and connection.pid
            ):
                return f"process {connection.pid} ({psutil.Process(connection.pid).name()})"
    return why


def _digest(path: Path) -> str | None:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    except OSError:
        return None


def _flat(path: str) -> dict[str, str] | None:
    """Return a JSON file's values by dotted key; None where it cannot be read."""
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    values: dict[str, str] = {}

    def walk(where: str, part: Any) -> None:
        if isinstance(part, dict) and part:
            for key, inner in part.items():
                walk(f"{where}.{key}" if where else str(key), inner)
        else:
            values[where] = json.dumps(part)

    walk("", value)
    return values


def main() -> None:
    """Answer the two requests of doctor/hosts.py, then end."""
    line = sys.stdin.readline()
    if not line.startswith("{"):
        print("expected a request from ds-ring, got none; `ds-ring doctor` starts this by itself")
        sys.exit(2)
    request: Answer = json.loads(line)
    answer(examine(request))
    if sys.stdin.readline():
        answer(look(request))
        sys.stdin.readline()
    remove_marks(request)


if __name__ == "__main__":
    main()
