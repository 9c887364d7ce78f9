"""Cache what each pass of a schedule and a shape needs again: routes of messages and kinds of buffers."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ds_ring.comm.messages import PostedBatch
from ds_ring.ring.pair import BufferKinds
from ds_ring.schedule.steps import Schedule

# [Note: what a pass finds out once]
# The host time of a hop is Python, so results that do not depend on the caller's tensors are kept from pass
# to pass, by schedule and shape: the routes of the messages ([Note: routes] in protocols.py) and the kinds of
# the buffers. The pool keeps the memory of the buffers and their tensors. Messages are checked when their
# route is made. `python tools/bench.py host` measures the host time of a hop.


class PreparedBatch(NamedTuple):
    """The route of a batch, as the exchange computed it, and the sizes of its messages, for traces."""

    route: Any
    posted: PostedBatch


@dataclass
class PreparedPass:
    """What is cached for one schedule and tensors of one shape.

    Attributes:
        batches: by batch number, for the batches that were posted at least once.
        kinds: buffer kinds by the first K/V head of a chunk; `RingBuffers` adds those that are missing.
    """

    batches: dict[int, PreparedBatch] = field(default_factory=dict)
    kinds: defaultdict[int, BufferKinds] = field(default_factory=lambda: defaultdict(dict))


class PreparedPasses:
    """The cached data of all passes of one exchange; an entry lives as long as its schedule."""

    def __init__(self) -> None:
        self._passes: WeakKeyDictionary[Schedule, dict[Any, PreparedPass]] = WeakKeyDictionary()

    def get(self, schedule: Schedule, k: Tensor, v: Tensor) -> PreparedPass:
        """Return the cached data for this schedule and K and V of this shape, dtype and device."""
        key = (k.shape, v.shape, k.dtype, k.device, isinstance(k, FakeTensor))
        passes = self._passes.setdefault(schedule, {})
        prepared = passes.get(key)
        if prepared is None:
            prepared = passes[key] = PreparedPass()
        return prepared
