"""What doctor does where nobody answers, and where it is interrupted."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from ds_ring_launcher.doctor import findings, hosts


def test_a_stranger_at_the_port_that_says_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "_IMPORT_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        job = SimpleNamespace(master_address="127.0.0.1", port=silent.getsockname()[1], node_rank=1)
        with pytest.raises(RuntimeError, match="something else is there, which says nothing"):
            hosts._store(job, 0.1)


def test_an_interrupt_ends_the_command_that_doctor_runs(tmp_path: Path) -> None:
    started = tmp_path / "started"

    def interrupt() -> None:
        for _ in range(3000):
            if started.exists() and started.read_text().endswith("\n"):
                os.kill(os.getpid(), signal.SIGINT)
                return
            time.sleep(0.01)

    sender = threading.Thread(target=interrupt)
    command = ["sh", "-c", f"echo $$ > '{started}'; exec sleep 60"]
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)  # workers of xdist ignore it
    try:
        sender.start()
        with pytest.raises(KeyboardInterrupt) as raised:
            findings._run(command, {"PATH": "/usr/bin:/bin"}, 50)
    finally:
        signal.signal(signal.SIGINT, usual)
        sender.join()
    _, status = os.waitpid(int(started.read_text()), 0)
    assert os.WTERMSIG(status) == signal.SIGTERM, raised  # its traceback keeps the process for waitpid
