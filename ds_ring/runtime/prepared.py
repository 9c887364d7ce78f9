"""Cache what a ring pass computes once for all passes of a shape: buffer sizes and message routes.

Owns this bookkeeping; holds no tensor.

[Note: what a pass finds out once]
The host time of a hop is Python: tuples, look-ups and views. So everything that does not depend on the
caller's tensors is kept from pass to pass, by schedule and shape: peers, checks, byte counts and group ranks
of a batch ([Note: routes] in messages.py) and the kinds of its buffers. The memory of buffers is kept in a
pool, with the tensors that lie there and their views (`buffers.py`). What depends on the caller's tensors is
made once a pass (`views.py`); a copy of keys is never kept. Messages are checked when their route is made, in
later passes only for contiguity. A hop takes the host about 70 us forward and 145 us backward (`python -m
tools.bench_host`); `tests/unit/runtime/test_host_calls.py` bounds the number of Python calls.
"""

from __future__ import annotations

from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch import Tensor

from ds_ring.runtime.buffers import Kinds
from ds_ring.runtime.trace import PostedBatch, is_fake
from ds_ring.schedule.steps import HeadChunk, Schedule


class PreparedBatch(NamedTuple):
    """The route of a batch, as the exchange computed it, and the sizes of its messages, for traces."""

    route: Any
    posted: PostedBatch


class PreparedPass:
    """What is cached for one schedule and tensors of one shape.

    Attributes:
        batches: by batch number, for the batches that were posted at least once.
    """

    def __init__(self) -> None:
        self.batches: dict[int, PreparedBatch] = {}
        self._kinds: dict[int, Kinds] = {}

    def kinds_of(self, chunk: HeadChunk) -> Kinds:
        """Return the buffer kinds of a chunk; the caller adds those that are missing."""
        return self._kinds.setdefault(chunk.kv_heads.start, {})


class PreparedPasses:
    """The cached data of all passes of one exchange; an entry lives as long as its schedule."""

    def __init__(self) -> None:
        self._passes: WeakKeyDictionary[Schedule, dict[Any, PreparedPass]] = WeakKeyDictionary()

    def of(self, schedule: Schedule, k: Tensor, v: Tensor) -> PreparedPass:
        """Return what is cached for this schedule and K and V of this shape, dtype and device."""
        key = (k.shape, v.shape, k.dtype, k.device, is_fake(k))
        return self._passes.setdefault(schedule, {}).setdefault(key, PreparedPass())
