"""Keep what is made of tensors, views above all, for as long as these stay.

Owns that bookkeeping: a view takes the host longer than a small operator, and every hop would make the same
ones again. Those of a message buffer live as long as the buffer, from pass to pass; those of what a caller
gave, as long as the pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

MOST = 64  # views of a pair that are kept

Made = dict[Any, Any]  # by what made it, and how
Two = tuple[Tensor, Tensor]


class Pair:
    """Hold two tensors that travel or are used together, and what was made of them.

    Not an attribute of a tensor: its views refer to it, which would keep it for ever.

    Args:
        first, second: K and V, or dK and dV, [B, G, slots, D] each; or two accumulators.
    """

    __slots__ = ("first", "made", "second")

    def __init__(self, first: Tensor, second: Tensor) -> None:
        self.first, self.second = first, second
        self.made: Made = {}


class Views:
    """Know the tensors of a pass that stay from hop to hop, or come again."""

    def __init__(self) -> None:
        self._made: dict[int, Made] = {}

    def add(self, pair: Pair) -> None:
        """Keep the views of two tensors that are made from now on; the caller keeps the pair."""
        self._made[id(pair.first)] = pair.made

    def drop(self, pair: Pair) -> None:
        """Forget two tensors: they are given back."""
        del self._made[id(pair.first)]

    def of(self, make: Callable[..., Two], first: Tensor, second: Tensor, *how: Any) -> Two:
        """Return `make(first, second, *how)`, views of both; kept if the pair was added.

        A copy is never kept: what a buffer holds changes, and a copy of keys must not outlive its hop.
        """
        made = self._made.get(id(first))
        if made is None:
            return make(first, second, *how)
        key = (make, how)
        found: Two | None = made.get(key)
        if found is None:
            found = make(first, second, *how)
            if _is_part(found[0], first) and _is_part(found[1], second):
                if len(made) > MOST:  # of batches whose rows differ from one to the next, say
                    made.clear()
                made[key] = found
        return found

    def once(self, make: Callable[..., Any], given: tuple[Any, ...], *how: Any) -> Any:
        """Return `make(*given, *how)`, made once a pass, in which `given` hold the same throughout.

        They are known by the first of them, a tensor: those behind it come with it at every hop.
        """
        made = self._made.get(id(given[0]))
        if made is None:
            # kept as well, so that no other tensor gets its id
            made = self._made[id(given[0])] = {None: given}
        key = (make, how)
        found = made.get(key)
        if found is None:
            found = made[key] = make(*given, *how)
        return found


def _is_part(part: Tensor, whole: Tensor) -> bool:
    """Return whether a tensor is another one, or a view of the same memory."""
    return part is whole or (part._base is not None and (part._base is whole or part._base is whole._base))


def some_heads(x: Tensor, heads: slice) -> Tensor:
    """Return heads of x [B, H, ...], a slice with both ends; x itself where these are all of them."""
    everything = heads.stop - heads.start == x.shape[1] and (heads.step is None or heads.step == 1)
    return x if everything else x[:, heads]
