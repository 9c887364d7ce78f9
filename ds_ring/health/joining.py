"""Join the failure detector of an initialised world, before anything else that ranks do together.

Owns what comes before a mesh exists, for `RingMesh.from_world` and for whoever has collectives of its own
before that: joining, with the error that names a rank, and leaving again where the start fails.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from ds_ring.errors import RingError, RingPeerError
from ds_ring.health.arrival import PeerLost
from ds_ring.health.first_collective import FirstCollective
from ds_ring.health.guarded_call import peer_error
from ds_ring.health.rendezvous import join
from ds_ring.health.watch import Watch
from ds_ring.schedule.grid import Grid


def join_monitor(
    grid: Grid,
    heartbeat_timeout_s: float,
    exit_after_fault_s: float | None,
    secret: str | None,
    timeout_s: float = 1800.0,
) -> Watch | None:
    """Join the failure detector of this world; arguments as in `RingMesh.from_world`. Collective.

    Returns:
        None where there is nobody to watch: the world has one rank, or its process group is fake.

    Raises:
        RingPeerError: another rank died meanwhile, or did not come in time; names it.
        RingMeshError, RingConfigError: of `rendezvous.join`.
    """
    if grid.world_size == 1 or dist.get_backend() == "fake":
        return None
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    settings = (heartbeat_timeout_s, exit_after_fault_s, secret, timeout_s)
    collective = FirstCollective() if dist.get_backend() == "gloo" else None
    try:
        return join(store, rank, grid.world_size, *settings, collective)
    except PeerLost as lost:
        raise peer_error(grid, rank, None, lost.fault) from lost


@contextmanager
def leave_on_error(watch: Watch | None) -> Iterator[None]:
    """Leave the failure detector where a start fails, and say why before that."""
    try:
        yield
    except RingPeerError:
        if watch is not None:
            watch.noticed = True
        raise
    except RingError:  # of the user: every rank raises one
        if watch is not None:
            watch.leave()
        raise
    except BaseException as error:
        if watch is not None:
            text = str(error).splitlines()[0][:300] if str(error) else ""
            watch.failed(f"{type(error).__name__} while the ranks were starting: {text}")
            watch.leave()
        raise
