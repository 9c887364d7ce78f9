"""Interfaces of `comm` that others implement, and the arguments that constructors of a mesh share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypedDict

from torch import Tensor
from torch.distributed import ProcessGroup

from ds_ring.comm.in_flight import Pending
from ds_ring.comm.mesh import RingMesh
from ds_ring.comm.messages import Counters, Message
from ds_ring.comm.streams import Streams
from ds_ring.limits import Timeouts


class Watchdog(Protocol):
    """Enforces the deadlines of messages that a stream waits for; `plugin.DEVICES` names one."""

    def add(self, batch: Pending) -> None:
        """Watch over a batch from now on."""

    def synchronize(self, mesh: RingMesh) -> None:
        """Wait until all batches so far are over, and raise if one has failed."""


class Collectives(Protocol):
    """Collectives of a ring that has no process group of its own, only one with further ranks.

    Each is called as the method of `Exchange` with its name. They send with the exchange that they are given.
    """

    def spread(self, exchange: Any, header: Tensor) -> Tensor:
        """Return the least and the greatest header of all ranks."""

    def all_gather(self, exchange: Any, tensor: Tensor, group: ProcessGroup | None) -> list[Tensor]:
        """Return every rank's (equally shaped, contiguous) tensor, in ring order."""

    def all_to_all(self, exchange: Any, parts: Sequence[Tensor], group: ProcessGroup | None) -> list[Tensor]:
        """Send part i of this rank to ring rank i."""


class MeshOptions(TypedDict, total=False):
    """The arguments that every constructor of a mesh takes besides its ranks.

    Attributes:
        timeout_s: seconds until every rank has come here, and until the groups are made; 1800 by default. (A
            hop has the exchange's limit.)
        heartbeat_timeout_s: seconds of silence after which a rank counts as lost; 10 by default.
        exit_after_fault_s: end this process, with its stacks, so long after a fault that raised no error here
            (it is stuck in a collective outside ds_ring); None, the default, leaves it alone.
        secret: what ranks and monitor process know each other by, the same on all ranks and at least 16
            characters; None, the default, lets rank 0 publish one in the store (see `joining.py`).
        ranks_per_node: consecutive ranks of the world that share a node (torchrun's LOCAL_WORLD_SIZE): rings
            over several nodes then travel on two levels where that sends less. None by default.
        timeouts: of what ds_ring's integrations do together on this mesh (`ds_ring.limits`).
    """

    timeout_s: float
    heartbeat_timeout_s: float
    exit_after_fault_s: float | None
    secret: str | None
    ranks_per_node: int | None
    timeouts: Timeouts | None


class InFlight(Protocol):
    """A batch of messages in flight."""

    def wait(self) -> None:
        """Return when every message of the batch has arrived."""


# [Note: routes] Apart from the tensors, a batch is the same at every pass of a shape: peers, sizes and order.
# So it is checked and looked up once, and kept as a route. Later passes provide tensors only: buffers of the
# same kinds, and slices of them or of the own shard that were contiguous when the route was made.
class Transport(Protocol):
    """What a ring pass needs of an exchange: between real ranks, or between virtual ranks in one process."""

    counters: Counters

    def route(self, sends: Sequence[Message], receives: Sequence[Message]) -> Any:
        """Return what `start` needs to know about all batches with these messages; see [Note: routes]."""

    def start(
        self, route: Any, sent: Sequence[Tensor], received: Sequence[Tensor], hop: int | None = None
    ) -> InFlight:
        """Start all messages of a hop, without waiting for them."""

    def streams(self, tensor: Tensor) -> Streams:
        """Return the object that orders the streams of a tensor's device."""
