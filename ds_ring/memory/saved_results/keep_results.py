"""Keep (out, lse) of passes in a checkpointed region, so that no key travels when the region is run again.

Activation checkpointing runs a region's forward pass again in the backward pass. What attention's gradient
needs of the ring is (out, lse), as large as the region's input: kept, a model of 8 layers has 8 forward
passes in a step and not 16. Of long sequences only the later rows may be kept, which cost most under a
causal pattern, and the others are computed again (BurstEngine, Sun et al. 2025, sequence-level selective
checkpointing). Owns the results that are kept for a region.

[Note: why not a selective policy]
All ranks decide alike, since they run the same code. torch's policy for selective checkpointing would do the
same for one of the three kinds of checkpointing, and would put a dispatch mode around every operation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ds_ring.comm.device_tables import leave_inference_mode, to_device
from ds_ring.comm.streams import active_fake_mode
from ds_ring.masks.branches import Branch, in_range
from ds_ring.masks.pattern import Pattern, QueryHead
from ds_ring.memory.regions import ResultStore, TensorStore
from ds_ring.ops.passes import Results, running_region

if TYPE_CHECKING:
    from ds_ring.ops.context import RingContext

_ATTRIBUTE = "_ds_ring_kept"


@dataclass(frozen=True)
class SavedRows:
    """Say which local slots' (out, lse) are kept, int64 [rows], and how to compute those of the others."""

    slots: Tensor
    run_others: Callable[[], Results]

    def select(self, results: Results) -> Results:
        """Return a copy of the rows to be kept."""
        return tuple(x.index_select(2, self.slots) for x in results)  # type: ignore[return-value]

    def completed(self, row_results: Results) -> Results:
        """Return all rows, of which `row_results` are those of `slots`."""
        results = self.run_others()
        for whole, part in zip(results, row_results, strict=True):
            whole.index_copy_(2, self.slots, part)
        return results


@dataclass
class SavedResults:
    """Hold the results of a region's calls, in their order.

    Attributes:
        results: of each call: which it was, and what returns out and lse (None if a model wrote to them).
        reader: number of the backward pass that took some; another one runs all passes again.
    """

    results: deque[tuple[object, Callable[[], Results | None]]] = field(default_factory=deque)
    reader: int | None = None

    def take(self, call: object) -> Results | None:
        """Return the results of the next call; None if they are not there as they were."""
        task = torch._C._current_graph_task_id()
        if self.reader not in (None, task):
            self.results.clear()
        self.reader = task
        if not self.results:
            return None
        same, results = self.results.popleft()
        return results() if same == call else None


def reuse_or_run(
    call: object,
    run: Callable[[], Results],
    store: TensorStore | None = None,
    rows: SavedRows | None = None,
) -> Results:
    """Return what a pass gives: kept results where its region is run again, else those of `run`.

    Args:
        call: equal for equal calls. Every rank decides alike, since all run the same region.
        store: where results are kept; None leaves them where they are.
        rows: which rows to keep; None for all.
    """
    region, again = running_region()
    if region is None:
        return run()
    saved = getattr(region, _ATTRIBUTE, None)
    if again:
        saved_results = saved.take(call) if saved is not None else None
        if saved_results is None:
            return run()
        return saved_results if rows is None else rows.completed(saved_results)
    if saved is None:
        saved = SavedResults()
        setattr(region, _ATTRIBUTE, saved)
    results = run()
    to_keep = results if rows is None else rows.select(results)
    if store is not None:
        tickets = [store.put(x) for x in to_keep]
        saved.results.append((call, lambda: (store.get(tickets[0]), store.get(tickets[1]))))
    else:  # as they are, unless they are written to
        versions = _versions(to_keep)
        saved.results.append((call, lambda: to_keep if _versions(to_keep) == versions else None))
    return results


def _versions(results: Results) -> tuple[int, ...]:
    return tuple(0 if x.is_inference() else x._version for x in results)


@dataclass(frozen=True)
class FirstQueries(Pattern):
    """Let queries at positions below `count` attend to all keys, and later queries to none.

    This is the mask of a recomputation of the first queries, which reuses the results of later ones.
    """

    count: int

    def branches(self, head: QueryHead) -> tuple[Branch, ...]:
        return (Branch(queries=in_range(0, self.count)),)


class KeepResults:
    """Keep (out, lse) of passes in checkpointed regions; of the last rows alone, if the options say so.

    `recompute_attention` is the part of the sequence whose rows are computed again.
    """

    def __init__(self) -> None:
        # for tensors of a description: the context of the rows that are computed again, and the other slots
        self._first: dict[Hashable, tuple[RingContext, Tensor]] = {}

    def run(
        self, context: RingContext, run: Callable[[RingContext], Results], q: Tensor, call: tuple[Any, ...]
    ) -> Results:
        """Return kept results where the region is run again, else those of `run`."""
        if isinstance(q, FakeTensor):
            return run(context)
        rows = None
        if context.options.recompute_attention:
            first, slots = self.first_queries(context, q.shape[2], q.device)
            rows = SavedRows(slots, partial(run, first))
        store = context.mesh.owners[ResultStore].store
        return reuse_or_run((context.handle, *call), partial(run, context), store, rows)

    @leave_inference_mode
    def first_queries(
        self, context: RingContext, local_tokens: int, device: torch.device
    ) -> tuple[RingContext, Tensor]:
        """Return the context that computes the sequence's first queries, as `recompute_attention` asks for.

        And the slots that it leaves out of this rank's shard of `local_tokens`, int64 on the device.
        """
        key = (local_tokens, device, active_fake_mode())
        if key not in self._first:
            layout = context.layout_for(local_tokens, device.type)
            count = max(1, int(layout.tokens * context.options.recompute_attention))
            first = context.with_pattern(context.pattern & FirstQueries(count), layout)
            later = np.flatnonzero(layout.positions(context.mesh.ring_rank) >= count)
            self._first[key] = first, to_device(torch.from_numpy(later), device)
        return self._first[key]
