"""Contestants of `ds-ring compare` with a fault each, and the worker that has them."""

from __future__ import annotations

import sys
import time

from torch import Tensor

from ds_ring_launcher.compare.cells import Cell
from ds_ring_launcher.compare.peers import ONE, PEERS, Entry, Peer, Where, ds_ring
from ds_ring_launcher.compare.worker import main


def wrong(cell: Cell, where: Where) -> Entry:
    """Be wrong in one value of a gradient of rank 1's keys."""
    positions, attend = ds_ring(cell, where)

    def spoil(gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        gradient[0, 0, 3, 0] += where.rank
        return gradient

    def attend_wrongly(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k = k.clone()
        k.register_hook(spoil)
        return attend(q, k, v)

    return Entry(positions, attend_wrongly)


def raises(cell: Cell, where: Where) -> Entry:
    """Raise on rank 1, while rank 0 waits for its messages."""
    positions, attend = ds_ring(cell, where)

    def attend_or_raise(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if where.rank == 1:
            raise RuntimeError("a kernel is missing")
        return attend(q, k, v)

    return Entry(positions, attend_or_raise)


def hangs(cell: Cell, where: Where) -> Entry:
    """Never answer."""
    time.sleep(3600)
    raise AssertionError


def dies(cell: Cell, where: Where) -> Entry:
    """End the process of rank 0."""
    if where.rank == 0:
        raise SystemExit(3)
    return ds_ring(cell, where)


def fails_later(cell: Cell, where: Where) -> Entry:
    """Be exact once, and raise in the first timed pass."""
    positions, attend = ds_ring(cell, where)
    calls: list[int] = []

    def attend_once(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) > 1:
            raise RuntimeError("out of memory")
        return attend(q, k, v)

    return Entry(positions, attend_once)


SEEDED = tuple(
    Peer(prepare.__name__, "torch", prepare) for prepare in (wrong, raises, hangs, dies, fails_later)
)

if __name__ == "__main__":
    main(sys.argv[1:], (ONE, *PEERS, *SEEDED))
