"""Make the first calls of NCCL's process groups, so that no hop's deadline has to hold them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup


# [Note: before the first deadline]
# The first call of an NCCL communicator builds it, and the first message to a peer connects the two: seconds,
# which no hop's deadline should hold. So every communicator has one all-reduce here and the ring's a message
# to and from both neighbours, and the host waits for them, in the time that making the groups has. Other
# peers (direct sends, other nodes) connect in the first pass, which has a deadline of its own. The calls are
# in the order in which the groups were made, on every rank, so that no two communicators wait for each other.
# torch 2.13 makes no barrier a group (only with TORCH_DIST_INIT_BARRIER=1): after the one comparison of all
# ranks in `_check_same` these calls are where the ranks of a group meet. (NCCL ran them between ranks of one
# GPU; with gloo, whose groups connect when they are made, the same calls are tested.)
def warm_up(groups: Sequence[ProcessGroup]) -> None:
    """Make the first calls of NCCL's groups; [Note: before the first deadline]."""
    device = torch.device("cuda", torch.cuda.current_device())
    for group in groups:
        connect(group, device)
    torch.cuda.synchronize(device)


def connect(group: ProcessGroup, device: torch.device) -> None:
    """Make a collective call and exchange an element with both neighbours. Collective over the group."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    element = torch.ones(1, dtype=torch.float32, device=device)
    dist.all_reduce(element, group=group)
    # By an all-to-all that is empty but for two ranks: it makes the connections of point-to-point messages.
    counts = [int(peer in ((rank + 1) % size, (rank - 1) % size)) for peer in range(size)]
    sent = torch.ones(sum(counts), dtype=torch.float32, device=device)
    dist.all_to_all_single(torch.empty_like(sent), sent, counts, counts, group=group)
