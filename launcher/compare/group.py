"""Start the ranks of one contestant, send them commands under a deadline, and say what replies amount to.

Ranks go on to the next command only if all of them have answered this one, or all have refused it before any
message; else they are ended, and the next command starts others.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..run.parent import end_with_parent
from .cells import BOUNDS, NAMES, Cell
from .peers import NotOfferedError, Peer
from .worker import ANSWER, CHECK, Command

WORKER = (sys.executable, "-m", "ds_ring_launcher.compare.worker")
START_S, GRACE_S = 120.0, 3.0  # to import and join; of the others, once one rank has failed
_REFUSALS = ("AssertionError", "NotImplementedError", "ValueError")
_LOOK_S = 0.02
NO_ANSWER = "no answer in time: its ranks hang or have ended"
Reply = dict[str, Any]


class Verdict(NamedTuple):
    """Say how a contestant answered."""

    word: str  # exact, wrong, refused, does not run, not offered, not installed, left out
    why: str = ""
    error: float | None = None  # the largest one, where all tokens came back

    def __str__(self) -> str:
        return f"{self.word}: {self.why}" if self.why else self.word


class Group:
    """Hold the processes of one contestant."""

    def __init__(
        self, peer: Peer, size: int, device: str, worker: Sequence[str] = WORKER, start_s: float = START_S
    ) -> None:
        self.peer, self.size, self.device, self.worker, self.start_s = peer, size, device, worker, start_s
        self.processes: list[subprocess.Popen[bytes]] = []
        self.number = 0  # of the last command
        self.home: tempfile.TemporaryDirectory[str]

    @property
    def folder(self) -> Path:
        """Return where ranks meet and reply."""
        return Path(self.home.name)

    @property
    def has_ended(self) -> bool:
        """Return whether a rank has ended by itself."""
        return any(process.poll() is not None for process in self.processes)

    def start(self) -> None:
        """Start the ranks, unless they run; do not wait for them."""
        if self.processes:
            return
        self.home, self.number = tempfile.TemporaryDirectory(prefix="ds-ring-compare-"), 0
        quiet = {"MASTER_ADDR": "127.0.0.1", "TOKENIZERS_PARALLELISM": "false", "WORLD_SIZE": str(self.size)}
        if self.device == "cpu":
            quiet |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "DS_ACCELERATOR": "cpu"}
        with open(self.folder / "log", "wb") as log:
            for rank in range(self.size):
                words = [self.peer.name, str(rank), str(self.size), self.device, str(self.folder)]
                environment = os.environ | quiet | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                process = subprocess.Popen(
                    [*self.worker, *words], stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment,
                    preexec_fn=end_with_parent,
                )  # fmt: skip
                self.processes.append(process)

    def end(self) -> str:
        """End the ranks at once; return the last line that they printed."""
        printed = self._last_line() if self.processes else ""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()
            assert process.stdin is not None
            process.stdin.close()
        if self.processes:
            self.processes = []
            self.home.cleanup()
        return printed

    def _last_line(self) -> str:
        lines = (self.folder / "log").read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""

    def join(self, deadline_s: float) -> bool:
        """Start the ranks and wait until all have joined their process group; False if some have not."""
        self.start()
        return len(self._wait(0, time.monotonic() + deadline_s)) == self.size

    def call(
        self, kind: str, cell: Cell, answer: Path, deadline_s: float, passes: int = 1
    ) -> tuple[list[Reply], str]:
        """Send a command to all ranks; return their replies, and the last line that they printed.

        Ranks that did not all answer, or not all alike, are ended.
        """
        replies: list[Reply] = []
        if self.join(self.start_s):
            self.number += 1
            with suppress(BrokenPipeError):  # of a rank that has ended: its reply is missing
                for process in self.processes:
                    assert process.stdin is not None
                    pickle.dump(Command(self.number, kind, cell, answer, passes), process.stdin)
                    process.stdin.flush()
            replies = self._wait(self.number, time.monotonic() + deadline_s)
        printed = self._last_line()
        stages = {reply.get("stage") for reply in replies}
        if len(replies) < self.size or not (stages == {None} or stages == {"prepared"}):
            self.end()
        return replies, printed

    def _wait(self, number: int, until: float) -> list[Reply]:
        """Return the replies to a command: of all ranks, or those that came in time."""
        while True:
            failed = self.has_ended
            paths = [self.folder / f"{number}-{rank}.json" for rank in range(self.size)]
            replies = [json.loads(path.read_text()) for path in paths if path.exists()]
            if len(replies) == self.size or time.monotonic() >= until:
                return replies
            if failed or any("raised" in reply for reply in replies):
                until = min(until, time.monotonic() + GRACE_S)
            time.sleep(_LOOK_S)


def check(group: Group, cell: Cell, answer: Path, deadline_s: float) -> Verdict:
    """Return how a contestant answers a cell, beside the answer of one process."""
    replies, printed = group.call(CHECK, cell, answer, deadline_s)
    dtype = group.peer.dtype or cell.dtype
    return verdict(cell, dtype, group.size, replies, printed)


def write_answer(group: Group, cell: Cell, answer: Path, deadline_s: float) -> float | str:
    """Have one process compute the answer to a cell; return its seconds, or what went wrong."""
    replies, printed = group.call(ANSWER, cell, answer, deadline_s)
    if replies and "seconds" in replies[0]:
        return float(replies[0]["seconds"])
    return str(verdict(cell, cell.dtype, 1, replies, printed))


def verdict(
    cell: Cell, dtype: torch.dtype, size: int, replies: Sequence[Reply], printed: str = ""
) -> Verdict:
    """Return what the ranks' replies to a check amount to."""
    done = [reply for reply in replies if "errors" in reply]
    if len(done) == size:
        count = sum(reply["count"] for reply in done)
        if count != cell.tokens:
            return Verdict("wrong", f"{count} of {cell.tokens} tokens")
        worst = {name: max(reply["errors"][name] for reply in done) for name in NAMES}
        wrong = [f"{name} {_size(error)}" for name, error in worst.items() if not error <= BOUNDS[dtype]]
        word = "wrong" if wrong else "exact"
        return Verdict(word, ", ".join(wrong), max(worst.values()))
    return explain_failure(size, replies, printed)


def explain_failure(size: int, replies: Sequence[Reply], printed: str = "") -> Verdict:
    """Return why replies are no result."""
    raised = [reply for reply in replies if "raised" in reply]
    if not raised:
        return Verdict("does not run", f"{NO_ANSWER}: {printed}"[:200] if printed else NO_ANSWER)
    first = raised[0]
    why = first["text"] or first["raised"]
    if first["raised"] == NotOfferedError.__name__:
        return Verdict("not offered", why)
    refused = first["raised"] in _REFUSALS or first["raised"].startswith("Ring")
    if missing := re.search(r"aten[.:]+(\w+)", why):  # no kernel, or no rule for it, on the CPU
        return Verdict(
            "does not run", f"on CPU ranks: {why}" if "sharding" in why else f"{missing[1]} needs a GPU"
        )
    if refused and len(raised) == size:
        return Verdict("refused", why)
    if len(raised) == size:
        return Verdict("does not run", f"{first['raised']}: {why}")
    others = f"some ranks raise {first['raised']}, the others abort, hang or finish"
    return Verdict("does not run", others if _ENDED.search(why) else f"{others}: {why}")


_ENDED = re.compile("Read error|Connection closed")  # what the others hear of a rank that has ended


def _size(error: float) -> str:
    return "not finite" if math.isinf(error) else f"{error:.1g}"
