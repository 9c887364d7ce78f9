"""Ranks are killed, stopped, crash, leave, sleep or send the wrong thing: does every survivor say who it was?

Real processes over gloo: attention alone, or a DeepSpeed training step. A round is good if every survivor
ends with a typed error that names the culprit, in time, and no process hangs.

Example:
    python tools/fault_campaign.py --rounds 10
    python tools/fault_campaign.py --rounds 10 --mode deepspeed --only kill stop
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.dist.faults import IN_THE_CALL, KINDS, culprit_of  # noqa: E402

HEARTBEAT_S, HOP_S = 2.0, 6.0
SLEEP = "sleep longer than the deadline"


class Verdict(NamedTuple):
    """One round: what was wrong (nothing if it was good), and the seconds until the last survivor knew."""

    wrong: str
    seconds: float


class Zygote:
    """The process that forks the ranks."""

    def __init__(self, mode: str) -> None:
        command = [sys.executable, "-m", "tests.dist.zygote", "tests.dist.faults", mode]
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._read()

    def run(self, job: dict[str, Any]) -> dict[str, Any]:
        """The answer to a job."""
        assert self._process.stdin is not None
        print(json.dumps(job), file=self._process.stdin, flush=True)
        return self._read()

    def close(self) -> None:
        """End it, and wait until it is gone."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        while line := self._process.stdout.readline():
            if line.startswith("{"):  # libraries print, too
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise RuntimeError(f"the zygote ended with exit code {self._process.wait()}")


def play(zygote: Zygote, kind: str, mode: str, turn: int, world_size: int = 4) -> Verdict:
    """One round of one fault."""
    with tempfile.TemporaryDirectory() as folder:
        job = {"world_size": world_size, "folder": folder, "kind": kind, "mode": mode, "deadline_s": 90.0}
        job |= {"heartbeat_timeout_s": HEARTBEAT_S, "hop_timeout_s": HOP_S, "batch_number": 5 + turn % 4}
        job |= {"stopped": [culprit_of(kind)] if kind.startswith("stop") else []}
        exits = zygote.run(job)["exits"]
        return judge(kind, exits, Path(folder), world_size)


def judge(kind: str, exits: list[int | None], folder: Path, world_size: int) -> Verdict:
    """Hold what the ranks wrote down against what must be."""
    culprit = culprit_of(kind)
    if not (folder / "fault").exists():
        return Verdict("the fault did not happen: " + _logs(folder), 0.0)
    began = float((folder / "fault").read_text())
    limit = HOP_S + 3.0 if kind == SLEEP else 2 * HEARTBEAT_S + 1.0
    latest = 0.0
    for rank in range(world_size):
        if rank == culprit and kind not in IN_THE_CALL:
            continue
        path = folder / f"rank{rank}.json"
        if exits[rank] is None or not path.exists():
            how = "hung" if exits[rank] is None else f"ended with exit code {exits[rank]} and no typed error"
            return Verdict(f"rank {rank} {how}: " + _logs(folder), 0.0)
        seen = json.loads(path.read_text())
        latest = max(latest, seen["at"] - began)
        named = seen["peer"] == culprit or f"ring rank {culprit} " in seen["text"]
        named = named or re.search(rf"on rank {culprit}\b", seen["text"]) is not None
        own = rank == culprit and seen["type"] != "NoneType"
        if not (named or own) or not exits[rank]:
            return Verdict(f"rank {rank} ended with {exits[rank]} and {seen}", latest)
    return Verdict("" if latest < limit else f"{latest:.2f} s, expected below {limit:g} s", latest)


def _logs(folder: Path) -> str:
    logs = sorted(folder.glob("rank*.log"))
    return "\n".join(f"{log.name}: {log.read_text()[-1500:]}" for log in logs)


def main(arguments: list[str] | None = None) -> int:
    """Print a row per fault; the exit code is the number of bad rounds, 100 at most."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--mode", choices=("attention", "deepspeed"), default="attention")
    parser.add_argument("--only", nargs="*", default=[], help="faults whose name contains one of these")
    parser.add_argument("--json", action="store_true", help="one JSON row per fault")
    options = parser.parse_args(arguments)
    kinds = [kind for kind in KINDS if not options.only or any(part in kind for part in options.only)]
    zygote, bad, started = Zygote(options.mode), 0, time.monotonic()
    for kind in kinds:
        rounds = [play(zygote, kind, options.mode, turn) for turn in range(options.rounds)]
        wrong = [one.wrong for one in rounds if one.wrong]
        times = [one.seconds for one in rounds]
        bad += len(wrong)
        row = {"fault": kind, "mode": options.mode, "rounds": len(rounds), "good": len(rounds) - len(wrong)}
        row |= {"median_s": round(statistics.median(times), 2), "slowest_s": round(max(times), 2)}
        print(json.dumps(row) if options.json else "  ".join(f"{k} {v}" for k, v in row.items()), flush=True)
        for text in wrong[:2]:
            print("    " + text.replace("\n", "\n    "), flush=True)
    zygote.close()
    print(f"{bad} bad rounds, {time.monotonic() - started:.0f} s", flush=True)
    return min(bad, 100)


if __name__ == "__main__":
    sys.exit(main())
