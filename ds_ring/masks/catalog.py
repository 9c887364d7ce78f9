"""The catalog of patterns. Each lists its branches (`branches.py`).

A new pattern is a class in a folder of `ds_ring/patterns`. Documents and trees, slices, dilated attention and
mask functions have folders there.
"""

from __future__ import annotations

from dataclasses import dataclass

from ds_ring.errors import RingPatternError, check_bool
from ds_ring.masks.branches import ALL, Branch, Remainder, Segment, in_range, match_labels
from ds_ring.masks.pattern import Pattern, QueryHead, check_numbers
from ds_ring.masks.tiles import UNBOUNDED
from ds_ring.plugin import JsonKey


@dataclass(frozen=True)
class Full(Pattern):
    """Attend to every key from every query."""

    made_in_graphs = True

    def branches(self, head: QueryHead) -> tuple[Branch, ...]:
        return (Branch(),)


@dataclass(frozen=True)
class Causal(Pattern):
    """Attend to the query's own position and to all positions before it."""

    made_in_graphs = True

    def branches(self, head: QueryHead) -> tuple[Branch, ...]:
        return (Branch(least=0),)


@dataclass(frozen=True)
class Before(Pattern):
    """Attend to keys at least `apart` tokens before the query; by default, to all keys before the query."""

    apart: int = 1

    def branches(self, head: QueryHead) -> tuple[Branch, ...]:
        return (Branch(least=self.apart),)


@dataclass(frozen=True)
class Band(Pattern):
    """Attend where query position - key position is from `least` to `most`; +-UNBOUNDED if open."""

    least: int = -UNBOUNDED
    most: int = UNBOUNDED

    def branches(self, head: QueryHead) -> tuple[Branch, ...]:
        return (Branch(least=self.least, most=self.most),)


class _NumbersOfTokens:
    """Check the fields of a pattern: `causal`, if there is one, must be a bool, the others positive ints."""

    made_in_graphs = True

    def __post_init__(self) -> None:
        check_numbers(self, *(name for name in vars(self) if name != "causal"))
        check_bool(getattr(self, "causal", True), f"{type(self).__name__}: causal", RingPatternError)


@dataclass(frozen=True)
class SlidingWindow(_NumbersOfTokens, Pattern):
    """Attend to the `window` positions that end with the query's own (Beltagy et al. 2020, Longformer).

    Attributes:
        window: number of positions in the window, the query's own included (as in Mistral). FlashAttention's
            window_size for a causal window is (window - 1, 0).
        causal: if False, a query also attends to the window - 1 positions after its own.

    Raises:
        RingPatternError: `window` is not a positive integer, or `causal` is not a bool.
    """

    window: int
    causal: bool = True

    def branches(self, head: QueryHead) -> tuple[Branch, ...]:
        return (Branch(least=0 if self.causal else 1 - self.window, most=self.window - 1),)


@dataclass(frozen=True)
class DilatedWindow(_NumbersOfTokens, Pattern):
    """Attend to `window` positions `rate` apart that end with the query itself (Longformer's dilated window).

    Attributes:
        window: number of positions that a query sees, its own included; the first of them is
            (window - 1) x rate tokens before the query.
        rate: distance between consecutive positions that a query sees; with 1 it is `SlidingWindow`.
        causal: if False, a query also sees as many positions after it as before it.

    Raises:
        RingPatternError: a number that is not a positive integer.
    """

    window: int
    rate: int
    causal: bool = True

    def branches(self, head: QueryHead) -> tuple[Branch, ...]:
        reach = (self.window - 1) * self.rate
        # equal remainders select every `rate`-th position; the band limits how many of them
        return (match_labels(Remainder(self.rate), least=0 if self.causal else -reach, most=reach),)


@dataclass(frozen=True)
class Sinks(_NumbersOfTokens, Pattern):
    """Attend to the first `sinks` tokens. StreamingLLM (Xiao et al. 2023) is `SlidingWindow(w) | Sinks(n)`.

    Attributes:
        sinks: number of tokens that all queries see.
        causal: if True, a query that is a sink itself does not see the sinks after it.

    Raises:
        RingPatternError: the number of sinks is not a positive integer.
    """

    sinks: int
    causal: bool = True

    def branches(self, head: QueryHead) -> tuple[Branch, ...]:
        return (Branch(ALL, in_range(0, self.sinks), least=0 if self.causal else -UNBOUNDED),)


@dataclass(frozen=True)
class Chunked(_NumbersOfTokens, Pattern):
    """Attend to the query's own position and to the positions before it in the same chunk.

    Attributes:
        chunk: number of positions of a chunk; the first chunk begins at position 0.
        causal: if False, a query also attends to the later positions of its chunk.

    Raises:
        RingPatternError: `chunk` is not a positive integer, or `causal` is not a bool.
    """

    json_key = JsonKey("chunk", "tokens see their own chunk of n tokens only (Llama 4)")
    chunk: int
    causal: bool = True

    def branches(self, head: QueryHead) -> tuple[Branch, ...]:
        return (match_labels(Segment(self.chunk), least=0 if self.causal else -UNBOUNDED),)


@dataclass(frozen=True)
class PrefixLM(_NumbersOfTokens, Pattern):
    """Attend causally, and among the first `prefix` tokens in both directions (as in T5 and PaliGemma).

    Attributes:
        prefix: number of tokens that all attend to each other.

    Raises:
        RingPatternError: `prefix` is not a positive integer.
    """

    # The dict has the JSON keys that must keep their default values if "prefix" is set, and for each key the
    # reason that the error prints.
    json_key = JsonKey(
        "prefix",
        "the first n tokens see one another both ways",
        {
            "causal": "hides no later token",
            "window": "hides later tokens all the same",
            "chunk": "hides later tokens all the same",
            "segment_lengths": "hides later tokens all the same",
        },
    )
    prefix: int

    def branches(self, head: QueryHead) -> tuple[Branch, ...]:
        # Keys of the first branch are not after the query; keys of the second branch are. No pair is in both.
        prefix = in_range(0, self.prefix)
        return Branch(least=0), Branch(prefix, prefix, most=-1)


@dataclass(frozen=True)
class HeadShard(Pattern):
    """The pattern of the heads of one Ulysses rank.

    [Note: numbers of heads]
    Some patterns depend on the index of a query head among all heads of the model. `Dilated` (LongNet), for
    example, may give each head an offset. A Ulysses rank numbers its heads from 0; this class adds the number
    of heads before them.

    Attributes:
        whole: the pattern of all heads.
        part: index of this rank's heads among `parts` equal, consecutive parts of all heads.
    """

    whole: Pattern
    part: int
    parts: int

    def branches(self, head: QueryHead) -> tuple[Branch, ...]:
        number = self.part * head.query_heads + head.number
        of_all = QueryHead(number, self.parts * head.query_heads, self.parts * head.kv_heads)
        return self.whole.branches(of_all)
