"""Lay out the folder of a run: logs and faults by rank and attempt, and a line for everything that happens.

Owns names and formats; decides nothing. Imports nothing that takes time, since every rank imports it before
its script. All hosts see one folder (as they do the checkpoints). Times are seconds since 1970.

    RUN/                          `run_folder` of the cluster YAML
      attempts.jsonl              one JSON object a line, in the order in which things happened:
          {"event": "start", "attempt": 1, "at": .., "engine": "torchrun", "hosts": {"node-0": 2},
           "world_size": 2, "sequence_parallel_size": 2, "checkpoint": "global_step40" or null,
           "missing": {"node-1": "why"}, "interfaces": {"node-0": ["10.0.0.1", "eth0"]},
           "checkpoints": their folder, or null}
          {"event": "fault", "attempt": 1, "at": .., "kind": "error" | "lost" | "storage" | "unknown",
           "rank": 1 or null, "host": "node-0" or null, "step": 7 or null, "what": "one line",
           "frames": ["train.py:12"]}
          {"event": "end", "attempt": 1, "at": .., "status": 1, "verdict": "done" | "failed" |
           "preempted" | "interrupted", "next": "again" | "stop", "why": "one line", "wait_seconds": 1.0}
      launcher.json               {"at", "host", "pid"} of `ds-ring launch`, renewed each minute
      status.html                 the status page, renewed by it each minute and after every event
      attempt-1/
          rank-0.log              stdout and stderr of rank 0, as the terminal shows them
          rank-0.fault.json       what ended it, if that was an exception: see `RankFault`
          rank-0.exit.json        {"rank": 0, "status": 75, "at": ..}: its script ended by itself
          rank-0.metrics.json     its latest figures, replaced at most twice a second
                                  (`ds_ring/integrations/deepspeed/run_report.py` writes them):
              {"rank", "at", "step", "loss" or null, "step_seconds", "tokens_per_second" of all ranks or null,
               "memory_bytes", "ring_rank", "world_size", "links": [{"from": rank, "hops", "hop_seconds",
               "wait_seconds", "bytes"}] of a step within the last ten seconds or so}
              "nan" and "inf" are words, as JSON has no such numbers
          history.jsonl           of rank 0: {"step", "at", "loss", "tokens_per_second", "step_seconds"}, two
                                  lines a second at most; of 4,000 every other one is left out
          ds_config.json          the DeepSpeed JSON, where it differs from the YAML's (a smaller ring)
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ds_ring.config.json_text import append_text, replace_text

ATTEMPTS = "attempts.jsonl"
FOLDER_VARIABLE = "DS_RING_RUN_FOLDER"  # of a rank: RUN/attempt-N
TOLD_TO_END = 143  # 128 + SIGTERM, which an engine sends to the ranks that are left
PREEMPTED = 75  # sysexits.h's EX_TEMPFAIL: saved and left, to be started again
CONFIG = "ds_config.json"
LAUNCHER = "launcher.json"
HISTORY = "history.jsonl"
PAGE = "status.html"


@dataclass(frozen=True)
class RankFault:
    """Describe the exception that ended a rank.

    Attributes:
        rank: in the world.
        at: when.
        step: the optimizer step that was under way, from 1; None before training or where nobody counts.
        kind: "error" (its own), "lost" (another rank's or the network's), "storage" (a disk).
        type, message: of the exception.
        frames: `file:line` of the innermost frames, outermost first.
        traceback: as Python prints it.
        blames: the rank that it names; None where it names none.
    """

    rank: int
    at: float
    step: int | None
    kind: str
    type: str
    message: str
    frames: tuple[str, ...]
    traceback: str
    blames: int | None = None


class RunFolder:
    """Write and read the files of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def attempt(self, number: int) -> Path:
        """Return the folder of an attempt."""
        return self.path / f"attempt-{number}"

    def start_attempt(self) -> int:
        """Make the folder of the next attempt; return its number, from 1."""
        self.path.mkdir(parents=True, exist_ok=True)
        numbers = (re.fullmatch(r"attempt-(\d+)", path.name) for path in self.path.iterdir())
        number = 1 + max((int(found[1]) for found in numbers if found), default=0)
        self.attempt(number).mkdir()
        return number

    def record(self, event: str, attempt: int, **more: Any) -> None:
        """Append a line to attempts.jsonl; a full disk must not end a run."""
        line = json.dumps({"event": event, "attempt": attempt, "at": time.time(), **more}) + "\n"
        try:
            append_text(self.path / ATTEMPTS, line)
        except OSError:
            pass

    def events(self) -> list[dict[str, Any]]:
        """Return the lines of attempts.jsonl; one that a crash cut short is left out."""
        return lines_of(self.path / ATTEMPTS)


def write_fault(folder: Path, fault: RankFault) -> None:
    """Write rank-N.fault.json into the folder of an attempt."""
    write_json(folder / f"rank-{fault.rank}.fault.json", asdict(fault))


def write_exit(folder: Path, rank: int, status: int) -> None:
    """Write rank-N.exit.json."""
    write_json(folder / f"rank-{rank}.exit.json", {"rank": rank, "status": status, "at": time.time()})


def faults_of(folder: Path) -> list[RankFault]:
    """Return the faults of an attempt, the first one first."""
    found = []
    for one in _files(folder, "fault"):
        try:
            found.append(RankFault(**{**one, "frames": tuple(one["frames"])}))
        except (KeyError, TypeError):  # another version's
            continue
    return sorted(found, key=lambda fault: fault.at)


def exits_of(folder: Path) -> dict[int, int]:
    """Return the exit status of each rank whose script ended by itself."""
    found = _files(folder, "exit")
    return {one["rank"]: one["status"] for one in found if _is_whole(one, "rank", "status")}


def silent_ranks(folder: Path) -> list[int]:
    """Return the ranks that began and did not say how they ended: killed, stopped, or cut off."""
    began = {int(path.name[5:-4]) for path in folder.glob("rank-*.log")}
    return sorted(began - {fault.rank for fault in faults_of(folder)} - set(exits_of(folder)))


def metrics_of(folder: Path) -> dict[int, dict[str, Any]]:
    """Return the latest figures of each rank that has written some."""
    return {one["rank"]: one for one in _files(folder, "metrics") if _is_whole(one, "rank")}


def newest_checkpoint(folder: Path | None) -> tuple[str, int] | None:
    """Return the tag that `latest` names, and when it was written; None where there is none."""
    if folder is None:
        return None
    try:
        path = folder / "latest"
        return path.read_text(encoding="utf-8").strip(), path.stat().st_mtime_ns
    except (OSError, ValueError):
        return None


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write a small file at once: a reader sees the old text or the new one. A full disk is left alone."""
    try:
        replace_text(path, json.dumps(value))
    except OSError:
        pass


def _files(folder: Path, kind: str) -> Iterator[dict[str, Any]]:
    for path in sorted(folder.glob(f"rank-*.{kind}.json")):
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        yield from _objects([text])


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Return the JSON objects of a file, one a line; what is cut short is left out."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return list(_objects(text.split("\n")))


def _is_whole(one: dict[str, Any], *names: str) -> bool:
    return all(type(one.get(name)) is int for name in names)


def _objects(texts: list[str]) -> Iterator[dict[str, Any]]:
    for text in texts:
        try:
            value = json.loads(text)
        except ValueError:
            continue
        if isinstance(value, dict):
            yield value
