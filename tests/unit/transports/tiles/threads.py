"""Ranks as threads of one process: a pass on each, and queues in place of the exchange.

A message is checked against what its receiver expects: the name, the shape and the dtype. Real ranks are in
tests/dist/transports/tiles.
"""

from __future__ import annotations

import queue
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from ds_ring.comm.messages import Message, check_messages
from ds_ring.kernels.interface import Kernel
from ds_ring.kernels.reference import ReferenceKernel
from ds_ring.masks.pattern import Pattern
from ds_ring.ops.shard import shard_sequence
from ds_ring.schedule.layout import Layout
from ds_ring.transports.tiles.grid import PassGrid
from ds_ring.transports.tiles.plan import tile_plan
from ds_ring.transports.tiles.tile_pass import GridPass

WAIT_S = 20.0


class Queues:
    """The exchange of one rank."""

    def __init__(self, rank: int, mail: dict[tuple[int, int], queue.Queue[Any]]) -> None:
        self.rank, self.mail, self.bytes_sent = rank, mail, 0
        self.spoil: Callable[[Message], Tensor] = lambda message: message.tensor  # seeds a fault

    def post(self, sends: Sequence[Message], receives: Sequence[Message], hop: int | None = None) -> Any:
        check_messages(sends)
        check_messages(receives)
        for one in sends:
            self.bytes_sent += one.tensor.nbytes
            self.mail[self.rank, one.peer].put((one.what, self.spoil(one).clone()))
        self.coming = receives
        return self

    def wait(self) -> None:
        for one in self.coming:
            name, tensor = self.mail[one.peer, self.rank].get(timeout=WAIT_S)
            got, expected = ((x.shape, x.dtype) for x in (tensor, one.tensor))
            assert (name, got) == (one.what, expected), f"{self.rank} from {one.peer}: {name} {got}"
            one.tensor.copy_(tensor)


def on_threads(
    grid: PassGrid, pattern: Pattern, layout: Layout, whole: Sequence[Tensor], grad_lse: Tensor | None = None,
    make_kernel: Callable[[], Kernel] = ReferenceKernel, chunk_bytes: int = 1,
    spoil: Callable[[Message], Tensor] | None = None,
) -> tuple[list[Tensor], list[tuple[int, int]]]:  # fmt: skip
    """Out, lse, dq, dk and dv of `whole` (q, k, v, grad_out), gathered; each rank's bytes of both passes."""
    mail: dict[tuple[int, int], queue.Queue[Any]] = defaultdict(queue.Queue)
    for pair in ((a, b) for a in range(layout.ring_size) for b in range(layout.ring_size)):
        mail[pair]  # made here: threads only look them up
    plan = tile_plan(pattern, layout, whole[0].shape[1], whole[1].shape[1], grid)

    def run(rank: int) -> tuple[list[Tensor], tuple[int, int]]:
        q, k, v, grad = (shard_sequence(x, layout, ring_rank=rank, dim=2) for x in whole)
        of_lse = None if grad_lse is None else shard_sequence(grad_lse, layout, ring_rank=rank, dim=2)
        exchange = Queues(rank, mail)
        if spoil is not None and rank == 0:
            exchange.spoil = spoil
        made = GridPass(plan, rank, make_kernel(), exchange, q.shape[-1] ** -0.5, chunk_bytes)  # type: ignore[arg-type]
        out, lse = made.forward(q, k, v)
        forward = exchange.bytes_sent
        grads = made.backward(grad, q, k, v, out, lse, of_lse)
        return [out, lse, *grads], (forward, exchange.bytes_sent - forward)

    with ThreadPoolExecutor(layout.ring_size) as threads:
        found = list(threads.map(run, range(layout.ring_size)))
    order = torch.from_numpy(layout.slots_by_position())
    parts = zip(*(results for results, _ in found), strict=True)
    return [torch.cat(one, dim=2).index_select(2, order) for one in parts], [sent for _, sent in found]
