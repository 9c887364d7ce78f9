"""The server that ranks are forked from: one for all workers of a run. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

RANK_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",  # or gloo asks the name service for this host's address
    "TORCHINDUCTOR_COMPILE_THREADS": "1",  # more would fork a pool of compilers in every rank
    "DS_ACCELERATOR": "cpu",
}
_PRELOAD = ["tests.dist.preload"]
_ROOT = Path(__file__).resolve().parents[2]
_SERVER = forkserver._forkserver


def start_server() -> str:
    """Start this process's server, unless it has one, and return its address.

    With the ranks' environment: OpenMP reads its number of threads on import.
    """
    if _SERVER._forkserver_address is None:
        forkserver.set_forkserver_preload(_PRELOAD)
        with _environment(RANK_ENVIRONMENT | {"PYTHONPATH": f"{_ROOT}:{os.environ.get('PYTHONPATH', '')}"}):
            forkserver.ensure_running()
    return str(_SERVER._forkserver_address)


def use_server(address: str) -> None:
    """Fork this process's ranks from the server of another one, which ends with that one."""
    _SERVER._forkserver_address = address
    _SERVER._forkserver_alive_fd = os.open(os.devnull, os.O_WRONLY)  # each rank gets a copy, and closes it
    _SERVER.ensure_running = resource_tracker.ensure_running


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
