"""Run the scans and halos of all ranks in one process: their messages are copied.

A scan's messages have the size of a state, so all ranks can be alive at once, whatever the length of the
sequence. The tokens of the layers are the caller's, who may make them where they are used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ds_ring.layers.scan.scan import gradient_messages, scan_messages
from ds_ring.layers.scan.sequence_runs import halo_messages, sequence_runs
from ds_ring.masks.slots import IntArray
from ds_ring.schedule.layout import Layout

TokensOf = Callable[[int, IntArray], Tensor]


class VirtualResult(NamedTuple):
    """What each virtual rank has after an exchange, and the bytes that it sent."""

    tensors: list[Tensor]
    bytes_sent: list[int]


def virtual_scan(
    layout: Layout, transitions: Sequence[Tensor], increments: Sequence[Tensor], *,
    matrix: bool = False, reverse: bool = False,
) -> VirtualResult:  # fmt: skip
    """Return the states of `ring_scan` on every rank of a layout, without documents.

    Args:
        layout: of the tokens.
        transitions, increments: of each rank, as `ring_scan` takes them.
        matrix: see `ring_scan`.
        reverse: as the backward pass does, of gradients of the states in place of the increments.
    """
    runs, ranks = sequence_runs(layout), range(layout.ring_size)
    messages = gradient_messages if reverse else scan_messages
    jobs = [messages(runs, rank, transitions[rank], increments[rank], matrix) for rank in ranks]
    states: dict[int, Tensor] = {}
    sent = [0] * layout.ring_size
    while len(states) < layout.ring_size:
        posted = {}
        for rank, job in enumerate(jobs):
            try:
                posted[rank] = next(job)
            except StopIteration as end:
                states[rank] = end.value
        assert not (posted and states), "all ranks have the same number of rounds"
        for rank, (sends, _) in posted.items():
            for peer, message in sends.items():
                sent[rank] += message.nbytes
                posted[peer][1][rank].copy_(message)
    return VirtualResult([states[rank] for rank in ranks], sent)


def virtual_halo(layout: Layout, tokens_of: TokensOf, before: int, after: int = 0) -> VirtualResult:
    """Return the copies of `halo` on every rank, [R, before + after, ...], without documents.

    Args:
        layout: of the tokens.
        tokens_of: returns the tokens [n, ...] at some slots of a rank.
        before, after: see `halo`.
    """
    runs, width, sent = sequence_runs(layout), before + after, [0] * layout.ring_size
    plans = [halo_messages(layout, 1, rank, before, after) for rank in range(layout.ring_size)]
    copies = []
    for rank, messages in enumerate(plans):
        local = tokens_of(rank, messages.local[0])
        halos = local.new_zeros((len(runs.list_rank_runs(rank)) * width, *local.shape[1:]))
        halos[torch.from_numpy(messages.local[1])] = local
        for owner, places in messages.receives.items():
            message = tokens_of(owner, plans[owner].sends[rank])
            sent[owner] += message.nbytes
            halos[torch.from_numpy(places)] = message
        copies.append(halos.unflatten(0, (-1, width)))
    return VirtualResult(copies, sent)
