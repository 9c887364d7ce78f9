"""Run the scans of all ranks in one process: their messages are copied, and their bytes counted."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ds_ring.layers.scan.scan import gradient_messages, scan_messages
from ds_ring.layers.scan.sequence_runs import halo_messages, sequence_runs
from ds_ring.schedule.layout import Layout


def scan_bytes(
    layout: Layout, transitions: Sequence[Tensor], increments: Sequence[Tensor], matrix: bool, reverse: bool
) -> list[int]:
    """The bytes that each rank sends in `ring_scan`, or in its backward pass, without documents."""
    runs, ranks = sequence_runs(layout), range(layout.ring_size)
    messages = gradient_messages if reverse else scan_messages
    jobs = [messages(runs, rank, transitions[rank], increments[rank], matrix) for rank in ranks]
    sent = [0] * layout.ring_size
    while posted := {rank: tensors for rank, job in enumerate(jobs) if (tensors := next(job, None))}:
        assert len(posted) == layout.ring_size, "all ranks have the same number of rounds"
        for rank, (sends, _) in posted.items():
            for peer, message in sends.items():
                sent[rank] += message.nbytes
                posted[peer][1][rank].copy_(message)
    return sent


def halo_bytes(layout: Layout, token_bytes: int, before: int) -> list[int]:
    """The bytes that each rank sends in `halo`, without documents."""
    plans = [halo_messages(layout, 1, rank, before, 0) for rank in range(layout.ring_size)]
    sent = [0] * layout.ring_size
    for reader, plan in enumerate(plans):
        for owner, places in plan.receives.items():
            assert len(plans[owner].sends[reader]) == len(places)
            sent[owner] += token_bytes * len(places)
    return sent
