"""Strangers attack a live training job: not one bit of it changes."""

from __future__ import annotations

import json
import resource
import secrets
import threading
import time
from pathlib import Path

import pytest

from ds_ring_launcher.cluster.checks import choose_free_port
from tests.clock import wait_until
from tests.dist.campaign import Zygote
from tests.dist.strangers import ATTACKS, Target

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.night]


def attack(folder: Path, port: int, secret: str, refused: dict[str, str]) -> None:
    """All attacks, one after the other, once the job trains; then let it end."""
    try:
        wait_until((folder / "monitor").exists, 90.0)
        time.sleep(0.2)  # the number stands in it
        target = Target(int((folder / "monitor").read_text()), port, secret)
        for name, act in ATTACKS.items():
            try:
                act(target)
            except Exception as error:
                refused[name] = repr(error)
    finally:
        (folder / "stop").touch()


def test_strangers_change_not_one_bit_of_a_live_training(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 1300:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(1300, hard), hard))
    zygote, secret, steps = Zygote("", "tests.dist.strangers"), secrets.token_hex(32), 10**6
    losses = []
    try:
        for name in ("disturbed", "alone"):
            folder, port, wrong = tmp_path / name, choose_free_port(), dict[str, str]()
            folder.mkdir()
            job = {"world_size": 2, "folder": str(folder), "port": port, "secret": secret}
            job |= {"steps": steps, "deadline_s": 200.0}
            attacker = threading.Thread(target=attack, args=(folder, port, secret, wrong))
            if name == "disturbed":
                attacker.start()
            (exits,) = zygote.run(job)
            if name == "disturbed":
                attacker.join()
            logs = "\n".join((folder / f"rank{rank}.log").read_text()[-2000:] for rank in range(2))
            assert exits == [0, 0] and not wrong, (exits, wrong, logs)
            losses.append([json.loads((folder / f"losses{rank}.json").read_text()) for rank in range(2)])
            steps = len(losses[0][0])
    finally:
        zygote.close()
    assert steps > len(ATTACKS), "every attack met a training step"
    assert losses[0] == losses[1]
