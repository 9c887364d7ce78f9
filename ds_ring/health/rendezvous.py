"""Wait for all ranks before torch makes the default process group, in the store that torch will use."""

from __future__ import annotations

import datetime
import logging
import socket
from typing import TYPE_CHECKING, Any, NamedTuple

from ds_ring.health.failure_detector.wire import WARNED_PART, Fault
from ds_ring.health.joining import Arrival, PeerLost
from ds_ring.health.stuck_waits import make_peer_error
from ds_ring.limits import Limit
from ds_ring.schedule.grid import Grid

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

log = logging.getLogger(__name__)


class Rendezvous(NamedTuple):
    """Where the store of the default process group will be, and who this rank is.

    `hosts`: this rank hosts the store. `attempt` is another one after a restart by torchrun, whose store
    stays.
    """

    rank: int
    world_size: int
    host: str
    port: int
    hosts: bool
    attempt: str


def make_loopback_listener(host: str, port: int) -> dict[str, Any]:
    """Return what makes a TCPStore of one host listen on loopback alone; torch's own listens everywhere.

    No arguments for another address, or if the port is taken: then torch raises.
    """
    family = {"127.0.0.1": socket.AF_INET, "::1": socket.AF_INET6}.get(host)
    if family is None:
        return {}
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(2048)
    except OSError:
        listener.close()
        return {}
    return {"master_listen_fd": listener.detach()}  # the store's from here on


# [Note: before the process group]
# torch waits in `init_process_group` without saying for whom, and does not hear of a rank that has ended. So
# ranks announce themselves before, in the very store that torch will use: a server of the same process and
# port is shared.
def wait_for_ranks(where: Rendezvous, limit: Limit) -> Store | None:
    """Wait until every rank has come, before the default process group is made.

    Returns:
        The store, to be kept until the group is made; None where this rank cannot host it: then torch raises.

    Raises:
        RingPeerError: a rank did not come in time, or died during the wait; names it.
    """
    import torch.distributed as dist

    def connect(seconds: float) -> Store:
        timeout = datetime.timedelta(seconds=seconds)
        listener = make_loopback_listener(where.host, where.port) if where.hosts else {}
        return dist.TCPStore(  # type: ignore[attr-defined]  # a name of torch's extension
            where.host,
            where.port,
            None,
            where.hosts,
            timeout,
            wait_for_workers=False,
            multi_tenant=True,
            **listener,
        )

    warned_s = WARNED_PART * limit.seconds
    try:
        try:
            store = connect(warned_s)
        except RuntimeError:  # not there so far
            if where.hosts:
                return None
            log.warning(
                "rank 0 is late: %.1f s without an answer of the store at %s:%d; it counts as failed after"
                " %g s (%s)", warned_s, where.host, where.port, limit.seconds, limit.key,
            )  # fmt: skip
            store = connect(limit.seconds - warned_s)
        arrival = Arrival(store, f"ds_ring/start/{where.attempt}", where.rank, where.world_size, limit, None)
        arrival.announce()
        arrival.wait_for_all()
    except PeerLost as lost:
        raise make_peer_error(_make_line(where.world_size), where.rank, None, lost.fault) from lost
    except RuntimeError as error:
        fault = Fault(0, f"its store did not answer within {limit.seconds:g} s ({limit.key})")
        raise make_peer_error(_make_line(where.world_size), where.rank, None, fault) from error
    return store


def _make_line(world_size: int) -> Grid:
    """Return the numbering of a world before the sizes of its rings are known to all."""
    return Grid(world_size, world_size)
