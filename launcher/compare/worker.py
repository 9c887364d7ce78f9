"""Be one rank of a contestant: check and time what the parent sends, one reply for each command.

Commands come pickled on the standard input; a reply is a file of JSON that appears whole. The rank ends with
its input. Its parent decides what replies amount to, and ends ranks that hang.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ds_ring.transports.devices import select_gpu

from .cells import NAMES, Cell, worst_errors
from .peers import ONE, PEERS, Entry, Peer, Where

CHECK, ANSWER, TIME = "check", "answer", "time"
LIMIT_S = 600.0  # of a collective; the parent's deadlines are shorter


class Command(NamedTuple):
    """Say what ranks do next."""

    number: int  # of the command; its replies bear it
    kind: str
    cell: Cell
    answer: Path  # with the tensors of one process
    passes: int = 1  # of a timed turn


class Rank:
    """Hold what a rank keeps between commands: the contestant that it has prepared for a cell."""

    def __init__(self, peer: Peer, where: Where) -> None:
        self.peer, self.where = peer, where
        self.cell: Cell | None = None
        self.entry: Entry
        self.shards: list[Tensor]

    def reply(self, command: Command) -> dict[str, Any]:
        """Carry out a command; return its result, or what was raised and when."""
        cell = replace(command.cell, dtype=self.peer.dtype or command.cell.dtype)
        stage, began = "prepared", time.perf_counter()
        try:
            if command.kind == ANSWER:
                answer = {name: x.cpu() for name, x in command.cell.answer(self.where.device).items()}
                torch.save(answer, command.answer)
                return {"seconds": time.perf_counter() - began}
            self._prepare(cell)
            stage = "attended"
            return self._check(command) if command.kind == CHECK else self._time(command.passes)
        except Exception as error:
            if isinstance(error, NotImplementedError):
                stage = "prepared"  # there is no kernel: nothing was sent
            text = _without_paths(" ".join(str(error).split()))[:160]
            return {"stage": stage, "raised": type(error).__name__, "text": text}

    def _prepare(self, cell: Cell) -> None:
        if cell != self.cell:
            self.cell = None
            self.entry = self.peer.prepare(cell, self.where)
            positions = self.entry.positions
            self.shards = [_shard(x, positions) for x in cell.operands(self.where.device)]
            self.cell = cell

    def _attend(self) -> list[Tensor]:
        *leaves, grad = self.shards
        leaves = [x.detach().requires_grad_() for x in leaves]
        out = self.entry.attend(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad)]

    def _check(self, command: Command) -> dict[str, Any]:
        results = dict(zip(NAMES, self._attend(), strict=True))
        positions, answer = self.entry.positions, torch.load(command.answer, mmap=True)
        return {"errors": worst_errors(answer, results, positions), "count": int((positions >= 0).sum())}

    def _time(self, passes: int) -> dict[str, Any]:
        cuda = self.where.device == "cuda"
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        dist.barrier()
        self._synchronize()
        began = time.perf_counter()
        for _ in range(passes):
            self._attend()
        self._synchronize()
        seconds = (time.perf_counter() - began) / passes
        peak_bytes = torch.cuda.max_memory_allocated() if cuda else 0
        if cuda:
            torch.cuda.empty_cache()  # for the others' turns
        return {"seconds": seconds, "peak_bytes": peak_bytes}

    def _synchronize(self) -> None:
        if self.where.device == "cuda":
            torch.cuda.synchronize()


def be_rank(
    peers: Iterable[Peer], name: str, rank: int, size: int, device: str, folder: Path
) -> None:  # fmt: skip
    """Be one rank of the peer of that name until the standard input ends; never returns."""
    torch.set_num_threads(1)
    peer, where = next(peer for peer in peers if peer.name == name), Where(rank, size, device)
    if device == "cuda":
        torch.cuda.set_device(select_gpu(rank, torch.cuda.device_count()))
    store, limit = f"file://{folder}/store", timedelta(seconds=LIMIT_S)
    dist.init_process_group(where.backend, init_method=store, rank=rank, world_size=size, timeout=limit)
    state = Rank(peer, where)
    _note(folder, 0, rank, {})
    while (command := _read()) is not None:
        _note(folder, command.number, rank, state.reply(command))
    os._exit(0)  # peers leave threads and groups behind


def _read() -> Command | None:
    try:
        return pickle.load(sys.stdin.buffer)
    except EOFError:
        return None


def _without_paths(text: str) -> str:
    return re.sub(r" ?\(?/[\w./+-]+/[\w./+-]+\)?", "", text)


def _shard(x: Tensor, positions: Tensor) -> Tensor:
    """Return the tokens at these positions, zeros for padding."""
    positions = positions.to(x.device)
    return torch.where((positions >= 0)[:, None], x[:, :, positions.clamp(min=0)], 0.0).contiguous()


def _note(folder: Path, number: int, rank: int, what: dict[str, Any]) -> None:
    path = folder / f"{number}-{rank}.json"
    path.with_suffix(".part").write_text(json.dumps(what))
    path.with_suffix(".part").rename(path)


def main(words: list[str], peers: Iterable[Peer] = (ONE, *PEERS)) -> None:
    """Read a rank's arguments, which `group.py` writes."""
    name, rank, size, device, folder = words
    be_rank(peers, name, int(rank), int(size), device, Path(folder))


if __name__ == "__main__":
    main(sys.argv[1:])
