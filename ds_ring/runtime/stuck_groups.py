"""Abort the process groups of a mesh that are stuck after a fault.

Owns which groups, and in which order. Who failed, and when a batch is stuck, is `pending.py`'s.

[Note: which groups are aborted]
Of what was posted and does not end, the groups that the mesh has made: never the world's group, which is
DeepSpeed's, nor a group of somebody else. A healthy group of the mesh stays. Each is aborted once. An abort
can wait until another communicator is aborted, too (pytorch issue 119797). torch aborts in a thread of its
own, so ncclGroupStart and ncclGroupEnd around several calls of `abort` do not join them. Here each group is
aborted in a thread of its own, all of them are started before the first is waited for, and the wait has a
deadline. A group that cannot be aborted is logged.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from functools import partial

from torch.distributed import ProcessGroup

from ds_ring.health.watch import keep_for_ever
from ds_ring.runtime.mesh import RingMesh
from ds_ring.runtime.waiting import Task

_log = logging.getLogger(__name__)
ABORT_S = 30.0  # for all aborts together


def abort_groups(stuck: Iterable[tuple[RingMesh, ProcessGroup | None]]) -> None:
    """Abort those of the groups that their mesh has made, once; [Note: which groups are aborted]."""
    tasks: list[Task] = []
    for mesh, group in stuck:
        made = (mesh.sequence_group, mesh.ring_group, mesh.ulysses_group, mesh.data_group)
        if group is not None and any(group is one for one in made) and id(group) not in mesh.use.aborted:
            mesh.use.aborted.add(id(group))
            tasks.append(Task(partial(_abort, group)).start())
    deadline = time.monotonic() + ABORT_S
    late = [task for task in tasks if not task.ends_by(deadline)]
    if late:
        keep_for_ever(late)
        _log.error(
            "ds_ring: %d of %d process groups were not aborted in %g s", len(late), len(tasks), ABORT_S
        )


def _abort(group: ProcessGroup) -> None:
    try:
        group.abort()
    except RuntimeError as error:
        _log.error("ds_ring: a process group could not be aborted: %s", error)
