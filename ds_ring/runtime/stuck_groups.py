"""Abort the process groups of a mesh that are stuck after a fault.

Owns which groups, and in which order. Who failed, and when a batch is stuck, is `pending.py`'s.

[Note: which groups are aborted]
Of what was posted and does not end, the groups that the mesh has made: never the world's group, which is
DeepSpeed's, nor a group of somebody else. A healthy group of the mesh stays. Each is aborted once, in the
order in which the mesh makes groups (sequence, ring, Ulysses, data), the same on all ranks; several within
one ncclGroupStart and ncclGroupEnd, since aborts of different communicators wait for each other otherwise
(pytorch issue 119797). A group that cannot be aborted is logged, and the next one's turn comes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed import ProcessGroup

from ds_ring.runtime.mesh import RingMesh

_log = logging.getLogger(__name__)


def abort_groups(mesh: RingMesh, stuck: Iterable[ProcessGroup | None]) -> None:
    """Abort those of the groups that are the mesh's, and have not been; [Note: which groups are aborted]."""
    wanted = {id(group) for group in stuck if group is not None}
    made = (mesh.sequence_group, mesh.ring_group, mesh.ulysses_group, mesh.data_group)
    groups: list[ProcessGroup] = []
    for group in made:
        if group is not None and id(group) in wanted and id(group) not in mesh.use.aborted:
            mesh.use.aborted.add(id(group))
            groups.append(group)
    with _together(groups):
        for group in groups:
            try:
                group.abort()
            except RuntimeError as error:
                _log.error("ds_ring: a process group could not be aborted: %s", error)


@contextmanager
def _together(groups: list[ProcessGroup]) -> Iterator[None]:
    """Surround several aborts by NCCL's group calls, where the backend has them."""
    backend: Any = None
    if len(groups) > 1:
        try:
            backend = groups[0]._get_backend(torch.device("cuda"))
        except RuntimeError:  # none for this device
            backend = None
    if not hasattr(backend, "_group_start"):
        yield
        return
    backend._group_start()
    try:
        yield
    finally:
        backend._group_end()
