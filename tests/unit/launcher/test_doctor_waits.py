"""What doctor does where nobody answers, and where it is interrupted."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from types import SimpleNamespace

import pytest

from ds_ring_launcher.doctor import findings, hosts


def test_a_stranger_at_the_port_that_says_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "_IMPORT_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        job = SimpleNamespace(master_address="127.0.0.1", port=silent.getsockname()[1], node_rank=1)
        with pytest.raises(RuntimeError, match="something else is there, which says nothing"):
            hosts._store(job, 0.1)


def test_an_interrupt_ends_the_command_that_doctor_runs() -> None:
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        findings._run(["sleep", "60"], {"PATH": "/usr/bin:/bin"}, 50)
    assert time.monotonic() - began < 40
