"""Cache views of tensors, and other objects made from them, until the tensors are freed.

Creating a view costs more host time than launching a small operator, and every hop would create the same
views again. The views of a message buffer are kept as long as the buffer, also from pass to pass; the views
of a caller's tensor are kept until the end of the pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

MOST = 64  # views that are kept for each pair of tensors

Made = dict[Any, Any]  # by what made it, and how
Two = tuple[Tensor, Tensor]


class Pair:
    """Two tensors that travel or are used together (K and V, say), and the cache of their views.

    The cache is not an attribute of a tensor: its views refer to the tensor, so neither would ever be freed.

    Args:
        first, second: K and V, or dK and dV, [B, G, slots, D] each; or two accumulators.
    """

    __slots__ = ("first", "made", "second")

    def __init__(self, first: Tensor, second: Tensor) -> None:
        self.first, self.second = first, second
        self.made: Made = {}


class Views:
    """The cache for those tensors of a pass that are used in more than one hop."""

    def __init__(self) -> None:
        self._made: dict[int, Made] = {}

    def add(self, pair: Pair) -> None:
        """Cache the views of this pair from now on; the caller keeps the pair alive."""
        self._made[id(pair.first)] = pair.made

    def drop(self, pair: Pair) -> None:
        """Forget a pair whose memory is given back."""
        del self._made[id(pair.first)]

    def of(self, make: Callable[..., Two], first: Tensor, second: Tensor, *how: Any) -> Two:
        """Return `make(first, second, *how)`, views of both tensors; from the cache if the pair was added.

        A copy is never cached: the contents of a buffer change, and a copy of keys must not outlive its hop.
        """
        made = self._made.get(id(first))
        if made is None:
            return make(first, second, *how)
        key = (make, how)
        found: Two | None = made.get(key)
        if found is None:
            found = make(first, second, *how)
            if _is_part(found[0], first) and _is_part(found[1], second):
                if len(made) > MOST:  # for example if the rows differ from batch to batch
                    made.clear()
                made[key] = found
        return found

    def once(self, make: Callable[..., Any], given: tuple[Any, ...], *how: Any) -> Any:
        """Return `make(*given, *how)`, computed once in a pass; `given` must not change during the pass.

        The result is found by the first entry of `given`, a tensor; the other entries belong to it.
        """
        made = self._made.get(id(given[0]))
        if made is None:
            # Keep the tensor as well, so that no other tensor gets its id.
            made = self._made[id(given[0])] = {None: given}
        key = (make, how)
        found = made.get(key)
        if found is None:
            found = made[key] = make(*given, *how)
        return found


def _is_part(part: Tensor, whole: Tensor) -> bool:
    """Return whether `part` is `whole` or a view of the same memory."""
    return part is whole or (part._base is not None and (part._base is whole or part._base is whole._base))


def some_heads(x: Tensor, heads: slice) -> Tensor:
    """Return some heads of x [B, H, ...], given as a slice with both ends.

    X itself if these are all heads.
    """
    everything = heads.stop - heads.start == x.shape[1] and (heads.step is None or heads.step == 1)
    return x if everything else x[:, heads]
