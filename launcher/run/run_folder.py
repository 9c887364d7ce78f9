"""Lay out the folder of a run: logs and faults by rank and attempt, and a line for everything that happens.

Owns names and formats, and writes; run_records.py reads. Imports nothing that takes time, since every rank
imports it before its script. All hosts see one folder (as they do the checkpoints). Times are seconds since
1970.

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
           "preempted" | "interrupted", "next": "again" | "stop", "why": "one line", "wait_seconds": 1.0,
           "ring": false where no rank has made a ring, else true}
      launcher.json               {"at", "host", "pid", "token", ..} of `ds-ring launch`, renewed every five
                                  seconds (run_lock.py); launcher-1.json of host 1 where each has its own
      attempt-1/
          rank-0.log              stdout and stderr of rank 0, as the terminal shows them
          rank-0.fault.json       what ended it, if that was an exception: see `RankFault`
          rank-0.exit.json        {"rank": 0, "status": 75, "at": .., "step": 7 or null}: its script ended by
                                  itself
          rank-0.stopped          empty: made as soon as its process is gone, however that ended
          rank-0.ring             empty: it has made a ring
          launcher.json           {"token"} of the launcher that started the attempt
          rank-0.metrics.json     its latest figures, replaced at most twice a second
                                  (`ds_ring/measure/run_report.py` writes them):
              {"rank", "at", "step", "loss", "step_seconds", "tokens_per_second" of all ranks (each of
               these three may be null), "memory_bytes", "ring_rank", "world_size", "links": [{"from": rank,
               "hops", "hop_seconds", "wait_seconds", "bytes"}] of a step within the last ten seconds or so}
              "nan" and "inf" are words, as JSON has no such numbers
          rank-0.late.json        while others wait for it, longer than a tenth of the limit; another rank
                                  writes it: {"rank", "at", "seconds" that they have waited, "what" they wait
                                  for, "where" it is in its program, "limit_seconds", "key" of the JSON}
          history.jsonl           of rank 0: {"step", "at", "loss", "tokens_per_second", "step_seconds"}, two
                                  lines a second at most; of 4,000 every other one is left out
          ds_config.json          the DeepSpeed JSON, where it differs from the YAML's (a smaller ring)
"""

from __future__ import annotations

import json
import re
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ds_ring.errors import RingConfigError
from ds_ring.written_files import append_text, replace_text

ATTEMPTS = "attempts.jsonl"
FOLDER_VARIABLE = "DS_RING_RUN_FOLDER"  # of a rank: RUN/attempt-N
TOLD_TO_END = 143  # 128 + SIGTERM, which an engine sends to the ranks that are left
PREEMPTED = 75  # sysexits.h's EX_TEMPFAIL: saved and left, to be started again
CONFIG = "ds_config.json"
LAUNCHER = "launcher.json"
HISTORY = "history.jsonl"


@dataclass(frozen=True)
class RankFault:
    """Describe the exception that ended a rank.

    Attributes:
        rank: in the world.
        at: when.
        step: the optimizer step that was under way, from 1; None before training or if steps are not counted.
        kind: "error" (its own), "lost" (another rank's or the network's), "storage" (a disk).
        type, message: of the exception.
        frames: `file:line` of the innermost frames, outermost first.
        traceback: as Python prints it.
        blames: the rank that it names; None where it names none.
        raised: a `raise` of Python code raised it; False where compiled code did, as torch's collectives do.
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
    raised: bool | None = None


class RunFolder:
    """Write and read the files of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def attempt(self, number: int) -> Path:
        """Return the folder of an attempt."""
        return self.path / f"attempt-{number}"

    def start_attempt(self, token: str | None = None) -> int:
        """Make the folder of the next attempt; return its number, from 1.

        Args:
            token: of the launcher that starts it.

        Raises:
            RingConfigError: the folder cannot be made.
        """
        make_folder(self.path)
        try:
            numbers = (re.fullmatch(r"attempt-(\d{1,9})", path.name) for path in self.path.iterdir())
            number = 1 + max((int(match[1]) for match in numbers if match), default=0)
            self.attempt(number).mkdir()
        except OSError as error:
            raise _no_folder(self.path, error) from None
        if token is not None:
            write_json(self.attempt(number) / LAUNCHER, {"token": token})
        return number

    def record(self, event: str, attempt: int, **fields: Any) -> None:
        """Append a line to attempts.jsonl; a full disk must not end a run."""
        line = json.dumps({"event": event, "attempt": attempt, "at": time.time(), **fields}) + "\n"
        try:
            append_text(self.path / ATTEMPTS, line)
        except OSError:
            pass

    def events(self) -> list[dict[str, Any]]:
        """Return the lines of attempts.jsonl; one that a crash cut short is left out."""
        from .run_records import read_events

        return [event.model_dump(exclude_unset=True) for event in read_events(self.path)]


def make_folder(run: Path) -> None:
    """Make a run's folder where it is not there; RingConfigError if it cannot be made."""
    try:
        run.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _no_folder(run, error) from None


def _no_folder(run: Path, error: OSError) -> RingConfigError:
    return RingConfigError(
        f"run_folder: expected a folder to write to, got {error.strerror} for {error.filename or run}; name"
        " another one, or free its disk"
    )


def launcher_file(run: Path, node_rank: int = 0) -> Path:
    """Return the file with the heartbeat of a run's launcher."""
    return run / (LAUNCHER if node_rank == 0 else f"launcher-{node_rank}.json")


def write_fault(folder: Path, fault: RankFault) -> None:
    """Write rank-N.fault.json into the folder of an attempt."""
    write_json(folder / f"rank-{fault.rank}.fault.json", asdict(fault))


def write_exit(folder: Path, rank: int, status: int, step: int | None = None) -> None:
    """Write rank-N.exit.json."""
    record = {"rank": rank, "status": status, "at": time.time(), "step": step}
    write_json(folder / f"rank-{rank}.exit.json", record)


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write a small file at once: a reader sees the old text or the new one. A full disk is left alone."""
    try:
        replace_text(path, json.dumps(value))
    except OSError:
        pass


def has_ring(folder: Path) -> bool:
    """Return whether a rank of an attempt has made a ring."""
    return any(True for _ in folder.glob("rank-*.ring"))
