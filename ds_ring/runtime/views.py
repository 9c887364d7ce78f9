"""What a flash kernel computes from the queries once for all hops of a pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Views:
    """Results of functions of the queries, kept for one pass; what depends on keys is never kept."""

    def __init__(self) -> None:
        self._made: dict[int, dict[Any, Any]] = {}

    def once(self, make: Callable[..., Any], given: tuple[Any, ...], *how: Any) -> Any:
        """Return `make(*given, *how)`, computed once in a pass; `given` must not change during the pass.

        The result is found by the first entry of `given`, a tensor; the other entries belong to it.
        """
        # `given` is kept as well, so that no other tensor gets its id.
        made = self._made.setdefault(id(given[0]), {None: given})
        key = (make, how)
        if key not in made:
            made[key] = make(*given, *how)
        return made[key]
