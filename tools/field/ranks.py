"""Run peers on gloo ranks, cell after cell, in processes that may fail or hang.

A rank writes a file for each cell: its errors, or what was raised. Ranks go on to the next cell only if all
of them have answered this one, or all have refused it before any message; else the processes are ended and
others begin with the next cell.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ds_ring_launcher.run.parent import end_with_parent

from .cells import BOUNDS, CELLS, NAMES, Cell, worst_errors
from .peers import PEERS, SEEDED, NotOfferedError, Peer, Where

_REFUSALS = ("AssertionError", "NotImplementedError", "ValueError")
_LOOK_S = 0.05
START_S = 120.0
_STARTED, _MIXED = "started", 3


class Verdict(NamedTuple):
    """Say how a peer answered."""

    word: str  # exact, wrong, refused, does not run, not offered, not installed
    why: str = ""

    def __str__(self) -> str:
        return f"{self.word}: {self.why}" if self.why else self.word


def find_peer(name: str) -> Peer:
    """Return a peer by its name."""
    return next(peer for peer in (*PEERS, SEEDED) if peer.name == name)


def be_rank(rank: int, size: int, peer: Peer, cells: Sequence[Cell], folder: Path, seconds: float) -> None:
    """Be one rank: go through the cells."""
    torch.set_num_threads(1)
    store, limit = f"file://{folder}/store", timedelta(seconds=seconds)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size, timeout=limit)
    for number, cell in enumerate(cells):
        _note(folder, number, rank, {"stage": _STARTED})
        _note(folder, number, rank, compute_answer(peer, cell, Where(rank, size)))
        if not _all_alike(folder, number, size, seconds):
            os._exit(_MIXED)
    os._exit(0)  # peers leave threads and groups behind


def compute_answer(peer: Peer, cell: Cell, where: Where) -> dict[str, Any]:
    """Return a rank's errors of a cell, or what was raised and when."""
    stage, cell = "prepared", replace(cell, dtype=peer.dtype or cell.dtype)
    try:
        positions, attend = peer.prepare(cell, where)
        stage = "attended"
        real = positions >= 0
        operands = [_shard(x, positions) for x in cell.operands()]
        leaves = [x.requires_grad_() for x in operands[:3]]
        out = attend(*leaves)
        grads = torch.autograd.grad(out, leaves, operands[3])
    except Exception as error:
        if isinstance(error, NotImplementedError):
            stage = "prepared"  # there is no kernel: nothing was sent
        return {
            "stage": stage,
            "raised": type(error).__name__,
            "text": _without_paths(" ".join(str(error).split()))[:160],
        }
    results = dict(zip(NAMES, (out.detach(), *grads), strict=True))
    return {"errors": worst_errors(cell, cell.answer(), results, positions), "count": int(real.sum())}


def _without_paths(text: str) -> str:
    return re.sub(r" ?\(?/[\w./+-]+/[\w./+-]+\)?", "", text)


def _shard(x: Tensor, positions: Tensor) -> Tensor:
    """Return the tokens at these positions, zeros for padding."""
    return torch.where((positions >= 0)[:, None], x[:, :, positions.clamp(min=0)], 0.0).contiguous()


def _note(folder: Path, number: int, rank: int, what: dict[str, Any]) -> None:
    path = folder / f"{number}-{rank}.json"
    path.with_suffix(".part").write_text(json.dumps(what))
    path.with_suffix(".part").rename(path)


def _answers(folder: Path, number: int, size: int) -> list[dict[str, Any]]:
    paths = [folder / f"{number}-{rank}.json" for rank in range(size)]
    return [json.loads(path.read_text()) for path in paths if path.exists()]


def _all_alike(folder: Path, number: int, size: int, seconds: float) -> bool:
    """Wait for all ranks; return whether they may go on together."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        answers = _answers(folder, number, size)
        if len(answers) == size and all(reply.get("stage") != _STARTED for reply in answers):
            stages = {reply.get("stage") for reply in answers}
            return stages <= {None} or stages == {"prepared"}
        time.sleep(_LOOK_S)
    return False


def collect_verdicts(
    peer: Peer, size: int, cells: Sequence[Cell] = CELLS, seconds: float = 60.0
) -> list[Verdict]:
    """Return a peer's verdict on each cell."""
    if peer.version() is None:
        return [Verdict("not installed")] * len(cells)
    verdicts: list[Verdict] = []
    while len(verdicts) < len(cells):
        rest = cells[len(verdicts) :]
        with tempfile.TemporaryDirectory(prefix="conformance-") as name:
            verdicts += _processes(peer, size, rest, Path(name), seconds)
    return verdicts


def _processes(peer: Peer, size: int, cells: Sequence[Cell], folder: Path, seconds: float) -> list[Verdict]:
    """Start ranks once; return the verdicts that they came to, one at least."""
    names = [str(CELLS.index(cell)) for cell in cells]
    command = [sys.executable, str(Path(__file__).parents[1] / "conformance.py"), "--as-rank"]
    with open(folder / "log", "wb") as log:
        ranks = [
            subprocess.Popen(
                [*command, str(rank), str(size), peer.name, str(folder), str(seconds), *names],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=end_with_parent,
            )
            for rank in range(size)
        ]  # fmt: skip
        try:
            number, since = 0, time.monotonic() + START_S  # they import their packages first
            while any(rank.poll() is None for rank in ranks):
                answers = _answers(folder, number, size)
                if len(answers) == size and all(reply.get("stage") != _STARTED for reply in answers):
                    number, since = number + 1, time.monotonic()
                if answers and number == 0:
                    since = min(since, time.monotonic())
                if time.monotonic() > since + 2 * seconds or any(
                    rank.poll() not in (None, 0) for rank in ranks
                ):
                    break
                time.sleep(_LOOK_S)
            time.sleep(10 * _LOOK_S)  # the others say what they raised
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    said = (folder / "log").read_text(errors="replace").strip().splitlines()
    verdicts = []
    for number, cell in enumerate(cells):
        answers = _answers(folder, number, size)
        if not answers and number:
            break
        cell = replace(cell, dtype=peer.dtype or cell.dtype)
        verdicts.append(verdict(cell, size, answers, said[-1] if said else ""))
    return verdicts


def verdict(cell: Cell, size: int, answers: Sequence[dict[str, Any]], said: str = "") -> Verdict:
    """Return what the ranks' answers to a cell amount to."""
    raised = [reply for reply in answers if "raised" in reply]
    done = [reply for reply in answers if "errors" in reply]
    if len(done) == size:
        count = sum(reply["count"] for reply in done)
        if count != cell.tokens:
            return Verdict("wrong", f"{count} of {cell.tokens} tokens")
        worst = {name: max(reply["errors"][name] for reply in done) for name in NAMES}
        wrong = [f"{name} {_size(error)}" for name, error in worst.items() if not error <= BOUNDS[cell.dtype]]
        return Verdict("wrong", ", ".join(wrong)) if wrong else Verdict("exact")
    if raised:
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
    return Verdict("does not run", f"no answer in time, the ranks abort or hang: {said}"[:200])


_ENDED = re.compile("Read error|Connection closed")  # what the others hear of a rank that has ended


def _size(error: float) -> str:
    return "not finite" if math.isinf(error) else f"{error:.1g}"
