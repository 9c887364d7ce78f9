"""Replace the sends of a virtual rank by looking up what would arrive."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ds_ring.masks.slot_ranges import progressions_at
from ds_ring.runtime.messages import (
    BatchSizes,
    Counters,
    Label,
    Message,
    TokenRange,
    check_messages,
    sizes_of,
)
from ds_ring.runtime.streams import HOST, Streams
from ds_ring.schedule.layout import IntArray, Layout
from ds_ring.simulation.source import Geometry, Source, put_rows

SOURCE_OF = {"K": "k", "V": "v"}


class Sums(Protocol):
    """Collect gradients that leave a virtual rank."""

    def add(self, what: str, tokens: TokenRange, runs: IntArray, part: Tensor) -> None:
        """Add "dK" or "dV" of some tokens; `part` is used again once this returns.

        Args:
            what: which.
            tokens: whose tokens.
            runs: their positions, int64 [m, 3] of (start, step, length).
            part: [B, heads, n, D or E], float32 or float64.
        """
        ...


class GradientSums:
    """Sum dK and dV of all tokens over the ranks that were simulated.

    Args:
        geometry: of the global tensors.
        dtype: of the sums, float32 or float64.

    Attributes:
        dk, dv: [B, G, T, D] and [B, G, T, E], in the order of positions.
    """

    def __init__(self, geometry: Geometry, dtype: torch.dtype) -> None:
        shape = (geometry.batch, geometry.kv_heads, geometry.tokens)
        self.dk, self.dv = (torch.zeros(*shape, geometry.width(name), dtype=dtype) for name in ("k", "v"))

    def add(self, what: str, tokens: TokenRange, runs: IntArray, part: Tensor) -> None:
        """Add gradients of some tokens; see `Sums.add`."""
        put_rows((self.dk if what == "dK" else self.dv)[:, tokens.heads], runs, part, add=True)


class Arrived:
    """Look a batch up when it is waited for, so that this takes no time of anything else.

    Args:
        arrive: looks it up, once.
    """

    def __init__(self, arrive: Callable[[], None]) -> None:
        self._arrive: Callable[[], None] | None = arrive

    def wait(self) -> None:
        """Fill what is received, collect what is sent, and drop both."""
        arrive, self._arrive = self._arrive, None
        if arrive is not None:
            arrive()


class VirtualRoute(NamedTuple):
    """Hold what all batches of a kind have in common: labels, and what they add to the counters."""

    sends: tuple[Label, ...]
    receives: tuple[Label, ...]
    sizes: BatchSizes


# [Note: one rank at a time]
# Keys and values that arrive are a copy of what the origin has, so they are filled in from the source of all
# tokens. Gradients that arrive are sums of what other ranks have found, which this rank only adds its own to
# and sends on: here they arrive as zeros, and every gradient that is sent is added to the sums of all ranks
# at the tokens that it belongs to. A rank's own contribution leaves it exactly once, to the next reader or
# home, or stays in the accumulators of its own shard, which are added at the end of a head chunk
# (`RingPass.on_gradients_final`). So each is counted once, and no two ranks have to be alive together.
class VirtualExchange:
    """Stand in for the exchange of a ring pass; [Note: one rank at a time].

    Args:
        source: K and V of all tokens.
        layout: which of them lie on which rank.
        sums: takes the gradients that are sent; None for a forward pass.
    """

    def __init__(self, source: Source, layout: Layout, sums: Sums | None = None) -> None:
        self.source, self.layout, self.sums = source, layout, sums
        self.counters = Counters()

    def route(self, sends: Sequence[Message], receives: Sequence[Message]) -> VirtualRoute:
        """Return what all batches like this one have in common.

        Raises:
            RingMismatchError: a message is not what the plan says, as in the real exchange.
        """
        check_messages(sends)
        check_messages(receives)
        to, of = (tuple(Label(*message[1:]) for message in side) for side in (sends, receives))
        return VirtualRoute(to, of, sizes_of(sends, receives))

    def start(
        self, route: VirtualRoute, sent: Sequence[Tensor], received: Sequence[Tensor], hop: int | None = None
    ) -> Arrived:
        """Return a batch that is filled and collected when it is waited for."""
        self.counters.count(route.sizes)
        sends, receives = (
            [Message(tensor, *label) for tensor, label in zip(tensors, labels, strict=True)]
            for tensors, labels in ((sent, route.sends), (received, route.receives))
        )
        return Arrived(partial(self._arrive, sends, receives))

    def streams(self, tensor: Tensor) -> Streams:
        """Return none to order: nothing travels."""
        return HOST

    def _arrive(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        for message in sends:
            # K and V that are sent need no copy: the reader looks them up in the source itself.
            if message.what not in SOURCE_OF:
                self._take(message)
        for message in receives:
            if message.what in SOURCE_OF:
                tokens = _tokens_of(message)
                self.source.fill(SOURCE_OF[message.what], tokens.heads, self._runs(tokens), message.tensor)
            else:
                # Another rank's sum would arrive here; it is counted where that rank sends it.
                message.tensor.zero_()

    def _take(self, message: Message) -> None:
        tokens = _tokens_of(message)
        assert self.sums is not None, "gradients in a forward pass"
        self.sums.add(message.what, tokens, self._runs(tokens), message.tensor)

    def _runs(self, tokens: TokenRange) -> IntArray:
        return progressions_at(self.layout.runs(tokens.origin), tokens.slots)

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Do nothing: there is no other rank to tell of an error."""
        yield


def _tokens_of(message: Message) -> TokenRange:
    assert message.tokens is not None, "a message of a pass says what it carries"
    return message.tokens
