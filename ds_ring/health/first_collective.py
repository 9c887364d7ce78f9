"""Keep a collective of one number under way while ranks come: it breaks in a neighbour of a rank that dies.

Owns that collective; what follows from its end is `arrival.py`'s.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from ds_ring.health.watch import keep_for_ever

PROBE_S = 1.0  # for the collective to end, once everybody is here
_LOOK_S = 0.002


class FirstCollective:
    """Sum one number over the default group, which is gloo's, in the background."""

    def __init__(self) -> None:
        self._number = torch.zeros(1)
        self._work: dist.Work | None = None

    def begin(self) -> None:
        """Take part from now on."""
        self._work = dist.all_reduce(self._number, async_op=True)

    def is_broken(self) -> bool:
        """Return whether the collective has failed here."""
        try:
            if self._work is not None and self._work.is_completed():
                self._work.wait()
        except RuntimeError:
            return True
        return False

    def end(self) -> None:
        """Wait until the collective ends, which it does now that everybody is here."""
        end = time.monotonic() + PROBE_S
        while self._is_under_way() and time.monotonic() < end:
            time.sleep(_LOOK_S)
        self.leave()

    def leave(self) -> None:
        """Go on without its end; torch may write to the number for as long as the process lives."""
        if self._is_under_way():
            keep_for_ever(self._work, self._number)

    def _is_under_way(self) -> bool:
        return self._work is not None and not self._work.is_completed()
