"""What a mesh holds for others: one object of each class that somebody asks it for.

So a mesh knows no class of a capability. An owner lives until the mesh is closed or collected. An owner may
define `per_ring = True` (a smaller ring of the mesh gets its own object), `release()` (called by
`RingMesh.close`) and `process_groups()` (groups that the watchdog may abort).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any


class Owners(dict[type, Any]):
    """Hold the owners of a mesh by class: `mesh.owners[HostMemory]` makes one at the first use.

    A dict, so that looking up an owner in a pass takes no call of Python.
    """

    def __init__(self, parent: Owners | None = None, is_own: Callable[[type], bool] | None = None) -> None:
        super().__init__()
        self._parent, self._is_own = parent, is_own or is_per_ring

    def __missing__(self, kind: type) -> Any:
        shared = self._parent is not None and not self._is_own(kind)
        found = self[kind] = self._parent[kind] if self._parent is not None and shared else kind()
        return found

    def derived(self, is_own: Callable[[type], bool] | None = None) -> Owners:
        """Return the owners of another mesh of these ranks: shared ones, and its own ones of some classes."""
        return Owners(self, is_own)

    def process_groups(self) -> list[Any]:
        """Return the process groups of all owners."""
        return [group for one in self.values() for group in getattr(one, "process_groups", list)()]

    def release(self) -> None:
        """Release and drop all owners."""
        for one in self.values():
            getattr(one, "release", lambda: None)()
        self.clear()


def is_per_ring(kind: type) -> bool:
    """Return whether each smaller ring of a mesh has its own object of a class."""
    return bool(getattr(kind, "per_ring", False))


class CallCounter(itertools.count):  # type: ignore[type-arg]
    """Count the headers of a ring: equal on all its ranks."""

    per_ring = True
