"""One round of a fault campaign: start the ranks, let one of them fail, hold what the others say against the rules."""

from __future__ import annotations

import json
import random
import re
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from tests.dist.faults import IN_THE_CALL, LATE, LATE_PLACES, LIMITS_S, OUTSIDE, WHILE_STARTING, culprit_of

ROOT = Path(__file__).resolve().parents[2]
HEARTBEAT_S, HOP_S = 2.0, 6.0
SLEEP = "sleep longer than the deadline"


class Verdict(NamedTuple):
    """One round: what was wrong (nothing if it was good), and the seconds until the last survivor knew."""

    wrong: str
    seconds: float


class Zygote:
    """The process that forks the ranks."""

    def __init__(self, mode: str, module: str = "tests.dist.faults") -> None:
        command = [sys.executable, "-m", "tests.dist.zygote", module, mode]
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._read()

    def run(self, *jobs: dict[str, Any]) -> list[list[int | None]]:
        """The exit codes of the ranks of each job; all run at once."""
        print(json.dumps(jobs), file=self._process.stdin, flush=True)
        exits: list[list[int | None]] = self._read()["exits"]
        return exits

    def close(self) -> None:
        """End it, and wait until it is gone."""
        self._process.stdin.close()
        self._process.wait(timeout=30)

    def _read(self) -> dict[str, Any]:
        while line := self._process.stdout.readline():
            if line.startswith("{"):  # libraries print, too
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise RuntimeError(f"the zygote ended with exit code {self._process.wait()}")


class Round(NamedTuple):
    """A fault, where it happens (a mode of `faults.py`), and the number of the round, which varies the rest."""

    kind: str
    mode: str
    turn: int


def play(zygote: Zygote, *rounds: Round, world_size: int = 4) -> list[Verdict]:
    """Rounds of one fault each, at once."""
    with tempfile.TemporaryDirectory() as root:
        folders = [Path(root, str(number)) for number in range(len(rounds))]
        jobs: list[dict[str, Any]] = []
        for (kind, mode, turn), folder in zip(rounds, folders, strict=True):
            folder.mkdir()
            job = {
                "world_size": world_size,
                "folder": str(folder),
                "kind": kind,
                "mode": mode,
                "deadline_s": 90.0,
            }
            job |= {"heartbeat_timeout_s": HEARTBEAT_S, "hop_timeout_s": HOP_S, "batch_number": 5 + turn % 4}
            job |= {"stage": turn % 4, "port": _free_port()}
            # The one that is stopped never ends, and nobody waits for the one that sleeps.
            jobs.append(job | {"stopped": [culprit_of(kind)] if kind.startswith(("stop", "sleep")) else []})
        results = zip(rounds, zygote.run(*jobs), folders, strict=True)
        return [judge(item.kind, exits, folder, world_size) for item, exits, folder in results]


def judge(kind: str, exits: list[int | None], folder: Path, world_size: int) -> Verdict:
    """Hold what the ranks wrote down against what must be."""
    culprit = culprit_of(kind)
    if not (folder / "fault").exists():
        return Verdict("the fault did not happen: " + _logs(folder), 0.0)
    began = float((folder / "fault").read_text())
    limit = HOP_S + 3.0 if kind == SLEEP else 2 * HEARTBEAT_S + 1.0
    limit = HEARTBEAT_S + 1.0 if kind in WHILE_STARTING else limit
    limit = HEARTBEAT_S + HOP_S + 3.0 if kind in OUTSIDE else limit  # stuck in a collective: the last resort
    if kind in LATE:  # the same after the limit of the place; two heartbeats until its numbers are believed
        limit = HEARTBEAT_S + HOP_S + 3.0 + limit_of(kind)
    latest = 0.0
    for rank in range(world_size):
        if rank == culprit and kind not in IN_THE_CALL:
            continue
        path = folder / f"rank{rank}.json"
        if kind in OUTSIDE | LATE and exits[rank] and not path.exists() and says(folder, rank, culprit):
            latest = max(latest, (folder / f"rank{rank}.log").stat().st_mtime - began)
            continue
        if exits[rank] is None or not path.exists():
            how = "hung" if exits[rank] is None else f"ended with exit code {exits[rank]} and no typed error"
            return Verdict(f"rank {rank} {how}: " + _logs(folder), 0.0)
        seen = json.loads(path.read_text())
        latest = max(latest, seen["at"] - began)
        named = seen["peer"] == culprit or f"ring rank {culprit} " in seen["text"]
        named = named or re.search(rf"on rank {culprit}\b", seen["text"]) is not None
        local = rank == culprit and seen["type"] != "NoneType"
        if not (named or local) or not exits[rank]:
            return Verdict(f"rank {rank} ended with {exits[rank]} and {seen}", latest)
    if kind in LATE and kind.startswith("sleep") and not _warned(folder, culprit):
        return Verdict("nobody was warned of the late rank: " + _logs(folder), latest)
    return Verdict("" if latest < limit else f"{latest:.2f} s, expected below {limit:g} s", latest)


def limit_of(kind: str) -> float:
    """Return the seconds that a rank may be late at the place of a fault of LATE."""
    return LIMITS_S.get(LATE_PLACES[LATE[kind][0]], HOP_S)


def _warned(folder: Path, culprit: int) -> bool:
    """Return whether a rank has logged that the culprit is late, which it does after a tenth of the limit."""
    logs = "".join(log.read_text() for log in folder.glob("rank*.log"))
    return f"rank {culprit} is late: " in logs or f"the ranks {culprit} are late: " in logs


def _free_port() -> int:
    """Return a port of this host below those that the kernel gives to connections."""
    while True:
        port = random.randrange(20_000, 32_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def says(folder: Path, rank: int, culprit: int) -> bool:
    """A rank that no typed error reached: is the culprit the first or the last thing in its log?

    First before the traceback of an error that is not ours, last where it ended itself with its stacks.
    """
    lines = [line for line in (folder / f"rank{rank}.log").read_text().splitlines() if line.strip()]
    named = [number for number, line in enumerate(lines) if f"rank {culprit} has failed" in line]
    traces = [number for number, line in enumerate(lines) if "Traceback" in line]
    return bool(named) and (named[0] < min(traces, default=0) or named[-1] == len(lines) - 1)


def _logs(folder: Path) -> str:
    logs = sorted(folder.glob("rank*.log"))
    return "\n".join(f"{log.name}: {log.read_text()[-1500:]}" for log in logs)
