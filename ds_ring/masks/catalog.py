"""The catalog of patterns. Each lists its branches (`branches.py`); a new pattern is a class here.

Masks that are a function of single pairs are `mask_mod.py`'s.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ds_ring.errors import RingPatternError, shown, true_or_false, whole_number
from ds_ring.masks.branches import (
    ALL,
    Branch,
    Remainder,
    Residue,
    Segment,
    Table,
    equal_labels,
    in_range,
    labelled,
    overlapping,
)
from ds_ring.masks.pattern import Pattern, QueryHead, check_numbers
from ds_ring.masks.tiles import UNBOUNDED, IntArray
from ds_ring.registry import JsonKey


@dataclass(frozen=True)
class Full(Pattern):
    """Attend to every key from every query."""

    def branches(self, head: QueryHead) -> tuple[Branch, ...]:
        return (Branch(),)


@dataclass(frozen=True)
class Causal(Pattern):
    """Attend to the query itself and to what came before."""

    def branches(self, head: QueryHead) -> tuple[Branch, ...]:
        return (Branch(least=0),)


@dataclass(frozen=True)
class Before(Pattern):
    """Attend to what came at least `apart` tokens before the query: without the query itself by default."""

    apart: int = 1

    def branches(self, head: QueryHead) -> tuple[Branch, ...]:
        return (Branch(least=self.apart),)


@dataclass(frozen=True)
class Band(Pattern):
    """Attend where query position - key position is from `least` to `most`; +-UNBOUNDED if open."""

    least: int
    most: int

    def branches(self, head: QueryHead) -> tuple[Branch, ...]:
        return (Branch(least=self.least, most=self.most),)


class _NumbersOfTokens:
    """Check patterns whose fields are positive integers, and perhaps `causal`."""

    def __post_init__(self) -> None:
        check_numbers(self, *(name for name in vars(self) if name != "causal"))
        true_or_false(getattr(self, "causal", True), f"{type(self).__name__}: causal", RingPatternError)


@dataclass(frozen=True)
class SlidingWindow(_NumbersOfTokens, Pattern):
    """Attend to the `window` positions that end with the query itself (Beltagy et al. 2020, Longformer).

    Attributes:
        window: number of positions seen, itself included, as in Mistral and FlashAttention's
            window_size = (window - 1, 0).
        causal: False sees window - 1 positions on either side as well.

    Raises:
        RingPatternError: the window is not a positive integer.
    """

    window: int
    causal: bool = True

    def branches(self, head: QueryHead) -> tuple[Branch, ...]:
        return (Branch(least=0 if self.causal else 1 - self.window, most=self.window - 1),)


@dataclass(frozen=True)
class DilatedWindow(_NumbersOfTokens, Pattern):
    """Attend to `window` positions `rate` apart that end with the query itself (Longformer's dilated window).

    Attributes:
        window: number of positions seen, itself included; they reach back (window - 1) x rate tokens.
        rate: distance of one position seen to the next; 1 is `SlidingWindow`.
        causal: False sees window - 1 positions on either side as well.

    Raises:
        RingPatternError: a number that is not a positive integer.
    """

    window: int
    rate: int
    causal: bool = True

    def branches(self, head: QueryHead) -> tuple[Branch, ...]:
        reach = (self.window - 1) * self.rate
        # the remainder picks every `rate`-th position, the band how many of them
        return (equal_labels(Remainder(self.rate), least=0 if self.causal else -reach, most=reach),)


@dataclass(frozen=True)
class Sinks(_NumbersOfTokens, Pattern):
    """Attend to the first `sinks` tokens (Xiao et al. 2023, StreamingLLM): `SlidingWindow(w) | Sinks(n)`.

    Attributes:
        sinks: number of tokens that all see.
        causal: a query among them sees none after itself.

    Raises:
        RingPatternError: the number of sinks is not a positive integer.
    """

    sinks: int
    causal: bool = True

    def branches(self, head: QueryHead) -> tuple[Branch, ...]:
        return (Branch(ALL, in_range(0, self.sinks), least=0 if self.causal else -UNBOUNDED),)


@dataclass(frozen=True)
class Chunked(_NumbersOfTokens, Pattern):
    """Attend to the query itself and to earlier keys in the query's own chunk of `chunk` tokens.

    Attributes:
        chunk: tokens of a chunk; the first begins at position 0.
        causal: False also attends to later keys of the chunk.

    Raises:
        RingPatternError: the chunk is not a positive integer.
    """

    json_key = JsonKey("chunk", "tokens see their own chunk of n tokens only, as in Llama 4")
    chunk: int
    causal: bool = True

    def branches(self, head: QueryHead) -> tuple[Branch, ...]:
        return (equal_labels(Segment(self.chunk), least=0 if self.causal else -UNBOUNDED),)


@dataclass(frozen=True)
class PrefixLM(_NumbersOfTokens, Pattern):
    """Attend causally, and within the first `prefix` tokens both ways (as in T5 and PaliGemma).

    Attributes:
        prefix: number of tokens that see one another.

    Raises:
        RingPatternError: the prefix is not a positive integer.
    """

    json_key = JsonKey(
        "prefix",
        "the first n tokens see one another both ways; all others are causal",
        {
            "causal": "hides no later token",
            "window": "hides later tokens all the same",
            "chunk": "hides later tokens all the same",
            "segment_lengths": "hides later tokens all the same",
        },
    )
    prefix: int

    def branches(self, head: QueryHead) -> tuple[Branch, ...]:
        # the second branch has only keys after their query, so no pair is in both
        prefix = in_range(0, self.prefix)
        return Branch(least=0), Branch(prefix, prefix, most=-1)


@dataclass(frozen=True)
class Documents(Pattern):
    """Attend within one document only; a negative id marks padding, which sees nothing.

    Attributes:
        starts, ids, tokens: stretches of equal ids, as in `Table`.
    """

    starts: tuple[int, ...]
    ids: tuple[int, ...]
    tokens: int

    def __init__(self, document_ids: Any | None = None, *, position_ids: Any | None = None) -> None:
        """Read the documents off one packed sequence.

        Args:
            document_ids: int [T] or [1, T], equal within a document.
            position_ids: int [T] or [1, T] that restart at 0 with every document, as Hugging Face packs.

        Raises:
            RingPatternError: neither or both given, or not one sequence of integers.
        """
        if (document_ids is None) == (position_ids is None):
            got = "neither" if document_ids is None else "both"
            raise RingPatternError(
                f"Documents: expected one of the two, got {got}: give exactly one of document_ids and"
                " position_ids"
            )
        values = _one_sequence(document_ids if position_ids is None else position_ids)
        if position_ids is not None:
            # a position that does not follow the one before it begins a document
            values = np.cumsum(np.diff(values, prepend=-1) != 1)
        starts = np.flatnonzero(np.diff(values, prepend=values[0] - 1))
        object.__setattr__(self, "starts", tuple(starts.tolist()))
        object.__setattr__(self, "ids", tuple(values[starts].tolist()))
        object.__setattr__(self, "tokens", len(values))

    @cached_property
    def _table(self) -> Table:  # cached, because the table has caches of its own
        # The label of a document is the number of its first run: small, and ascending unless an id reappears.
        ids = np.array(self.ids, dtype=np.int64)
        _, first, number = np.unique(ids, return_index=True, return_inverse=True)
        return Table(self.starts, tuple(np.where(ids < 0, -1, first[number]).tolist()), self.tokens)

    def branches(self, head: QueryHead) -> tuple[Branch, ...]:
        return (equal_labels(self._table),)

    def __str__(self) -> str:
        # tuples of ints have the same hash in every process, and ranks compare this text
        digest = hash((self.starts, self.ids))
        return f"Documents({len(self.starts)} stretches of {self.tokens} tokens, {digest})"


def _one_sequence(values: Any, name: str = "Documents") -> IntArray:
    try:
        array = np.asarray(values)
    except Exception as error:
        raise RingPatternError(
            f"{name}: expected integers of shape [T] or [1, T], got {shown(values)}"
            f" ({type(error).__name__} in numpy); pass a list, a numpy array or a tensor on the CPU"
        ) from error
    if array.ndim == 2 and len(array) == 1:
        array = array[0]
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer) or not len(array):
        raise RingPatternError(
            f"{name}: expected integers of shape [T] or [1, T], got {array.dtype} of shape {array.shape};"
            " for a batch of several sequences make one pattern for each"
        )
    # as int64 these would be negative, which means padding
    if array.dtype == np.uint64 and int(array.max()) >= 1 << 63:
        raise RingPatternError(f"{name}: expected integers below 2**63, got {int(array.max())}")
    return array.astype(np.int64)


@dataclass(frozen=True)
class Tree(Pattern):
    """Attend to the token's own node up to itself, and to all of the node's ancestors.

    For rollouts that share prefixes: the tokens of each path from a root to a leaf attend as in a causal
    sequence of their own, and a shared prefix is stored once. Nodes are consecutive, each after its parent. A
    forest has several roots. Distances along a path differ from distances in the sequence, so do not combine
    a tree with windows.

    Attributes:
        parents: the number of each node's parent, below the node's own; -1 for a root.
        lengths: tokens of each node.
        tokens: length T of the sequence; None is the sum of the lengths. Tokens after the last node are
            padding, which attends to nothing.

    Raises:
        RingPatternError: no node, other numbers of parents and lengths, a parent that does not come before
            its node, a length below 1, or fewer tokens than the nodes have.
    """

    parents: tuple[int, ...]
    lengths: tuple[int, ...]
    tokens: int | None = None

    def __post_init__(self) -> None:
        for name in ("parents", "lengths"):
            given = _one_sequence(getattr(self, name), f"Tree: {name}").tolist()
            object.__setattr__(self, name, tuple(given))
        if len(self.parents) != len(self.lengths):
            raise RingPatternError(
                f"Tree: expected a parent and a length for each node, got {len(self.parents)} parents and"
                f" {len(self.lengths)} lengths"
            )
        for node, (parent, length) in enumerate(zip(self.parents, self.lengths, strict=True)):
            if not -1 <= parent < node or length < 1:
                raise RingPatternError(
                    f"Tree: node {node}: expected a parent from -1 (a root) to {node - 1} and a length of at"
                    f" least 1, got parent {parent} and length {length}; put each node behind its parent"
                )
        total = sum(self.lengths)
        tokens = total if self.tokens is None else whole_number(self.tokens, "Tree: tokens", RingPatternError)
        if tokens < total:
            raise RingPatternError(f"Tree: expected at least the {total} tokens of the nodes, got {tokens}")
        object.__setattr__(self, "tokens", tokens)

    @cached_property
    def starts(self) -> IntArray:
        """Return the first position of each node, and the end of the last one; int64 [nodes + 1]."""
        return np.cumsum([0, *self.lengths])

    @cached_property
    def depths(self) -> IntArray:
        """Return the number of each token in its path, int64 [T]; 0 for padding."""
        found, ends = np.zeros(self.tokens or 0, dtype=np.int64), list[int]()
        for node, (parent, length) in enumerate(zip(self.parents, self.lengths, strict=True)):
            first = 0 if parent < 0 else ends[parent]
            found[self.starts[node] : self.starts[node + 1]] = np.arange(first, first + length)
            ends.append(first + length)
        return found

    @cached_property
    def _levels(self) -> tuple[Branch, ...]:
        # [Note: branches of a tree]
        # A branch has the keys of all nodes of one level. A query's label is its ancestor (or own node) on
        # that level, and a key's label is its node. The label of a node is the number of its run. So the
        # number of branches is the number of levels, not of nodes, and each pair is in one of them. A node
        # that is the only child of the node before it has the level of its parent.
        level, nodes_above = list[int](), list[tuple[int, ...]]()
        children = np.bincount(np.array(self.parents) + 1)  # of no parent, of node 0, of node 1, ..
        for node, parent in enumerate(self.parents):
            if parent < 0:
                level.append(0)
                nodes_above.append((node,))
            elif parent == node - 1 and children[parent + 1] == 1:
                level.append(level[parent])
                nodes_above.append(nodes_above[parent])
            else:
                level.append(level[parent] + 1)
                nodes_above.append((*nodes_above[parent], node))
        starts = tuple(self.starts[: -1 if self.starts[-1] == self.tokens else None].tolist())
        padding = (-1,) * (len(starts) - len(level))
        found = []
        for number in range(max(level) + 1):
            queries = tuple(path[number] if len(path) > number else -1 for path in nodes_above)
            keys = tuple(
                path[-1] if one == number else -1 for path, one in zip(nodes_above, level, strict=True)
            )
            of_queries, of_keys = (
                labelled(Table(starts, ids + padding, self.tokens or 0)) for ids in (queries, keys)
            )
            found.append(Branch(of_queries, of_keys, least=0))
        return tuple(found)

    def branches(self, head: QueryHead) -> tuple[Branch, ...]:
        return self._levels

    def __str__(self) -> str:
        # tuples of ints have the same hash in every process, and ranks compare this text
        return (
            f"Tree({len(self.parents)} nodes of {self.tokens} tokens, {hash((self.parents, self.lengths))})"
        )


SLICE_KINDS = ("full", "causal", "inverse-causal", "bi-causal")
_FORM = '((q_start, q_end), (k_start, k_end), kind), such as ((0, 8), (0, 8), "causal")'
Slice = tuple[tuple[int, int], tuple[int, int], str]


@dataclass(frozen=True)
class Slices(Pattern):
    """Attend to the keys of the slices that a query is in (MagiAttention's q_ranges, k_ranges, types).

    A slice is ((q_start, q_end), (k_start, k_end), kind), ends excluded. Of its rectangle, "full" attends to
    all pairs, "causal" to those on and left of the diagonal through the lower right corner, "inverse-causal"
    to those on and right of the diagonal through the upper left corner, "bi-causal" to those of both.

    Attributes:
        slices: no pair of positions in two of them.

    Raises:
        RingPatternError: none, one of another form, an empty range, an unknown kind, or two that overlap.
    """

    slices: tuple[Slice, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.slices, (list, tuple)) or not self.slices:
            raise RingPatternError(f"Slices: expected a list of {_FORM}, got {shown(self.slices)}")
        checked = tuple(_checked(number, given) for number, given in enumerate(self.slices))
        object.__setattr__(self, "slices", checked)
        branches = self.branches(QueryHead())
        first, second = np.nonzero(np.triu(overlapping(branches, branches), 1))
        if len(first):
            one, other = self.slices[first[0]], self.slices[second[0]]
            raise RingPatternError(
                f"Slices: expected slices without a common pair of positions, got {list(one)} and"
                f" {list(other)}, which overlap; cut one of them"
            )

    def branches(self, head: QueryHead) -> tuple[Branch, ...]:
        found = []
        for queries, keys, kind in self.slices:
            # q - k on the diagonal through the lower right corner, and through the upper left one
            least = queries[1] - keys[1] if kind in ("causal", "bi-causal") else -UNBOUNDED
            most = queries[0] - keys[0] if kind in ("inverse-causal", "bi-causal") else UNBOUNDED
            found.append(Branch(in_range(*queries), in_range(*keys), least, most))
        return tuple(found)


def _checked(number: int, given: Any) -> Slice:
    """Return a slice of Python ints, or raise RingPatternError."""
    where = f"Slices: slice {number}"
    if not isinstance(given, (list, tuple)) or len(given) != 3:
        raise RingPatternError(f"{where}: expected {_FORM}, got {shown(given)}")
    *ranges, kind = given
    if not isinstance(kind, str) or kind not in SLICE_KINDS:
        raise RingPatternError(f"{where}: kind: expected one of {', '.join(SLICE_KINDS)}, got {shown(kind)}")
    found = []
    for name, one in zip((f"{where}: q_range", f"{where}: k_range"), ranges, strict=True):
        if not isinstance(one, (list, tuple)) or len(one) != 2:
            raise RingPatternError(f"{name}: expected (start, end), got {shown(one)}")
        start, end = one
        # a range may begin at 0, which `whole_number` refuses
        if not (isinstance(start, int) and not isinstance(start, bool) and start == 0):
            start = whole_number(start, f"{name}: start", RingPatternError)
        end = whole_number(end, f"{name}: end", RingPatternError)
        if start >= end:
            raise RingPatternError(f"{name}: expected start below end, got {start} and {end}")
        found.append((start, end))
    return found[0], found[1], kind


HEAD_OFFSETS = ("paper", "paper_kv", "torchscale", "zero")


@dataclass(frozen=True)
class Dilated(Pattern):
    """Dilated attention (Ding et al. 2023, LongNet): branches of (segment length, dilation rate).

    LongNet mixes its branches by their softmax denominators. That equals a single softmax over all keys with
    log m added to the score, m the number of branches in which a pair takes part (`joins.py`).

    A pair takes part in branch i if both positions are in the same segment of length w_i, both have offset
    o(h, i) modulo r_i in it, and, if causal, the key is not after the query.

    Attributes:
        segment_lengths: w_i in tokens, strictly increasing; longer than the sequence means all of it.
        dilation_rates: r_i, strictly increasing, one for each segment length.
        causal: no key after its query.
        head_offsets: "paper": h mod r_i; "paper_kv": the same with the K/V head; "torchscale":
            h // ceil(H / r_i); "zero".

    Raises:
        RingPatternError: lists of different length, not positive, not increasing; unknown offset rule.
    """

    segment_lengths: tuple[int, ...]
    dilation_rates: tuple[int, ...]
    causal: bool = True
    head_offsets: str = "paper"

    def __post_init__(self) -> None:
        for name in ("segment_lengths", "dilation_rates"):
            values = _whole_numbers(getattr(self, name), name)
            object.__setattr__(self, name, values)
            if any(b <= a for a, b in itertools.pairwise(values)):
                raise RingPatternError(
                    f"Dilated: {name}: expected strictly increasing numbers, got {list(values)}"
                )
        if len(self.segment_lengths) != len(self.dilation_rates):
            raise RingPatternError(
                "Dilated: expected one dilation rate for each segment length: got"
                f" {len(self.segment_lengths)} lengths and {len(self.dilation_rates)} rates"
            )
        true_or_false(self.causal, "Dilated: causal", RingPatternError)
        if not isinstance(self.head_offsets, str) or self.head_offsets not in HEAD_OFFSETS:
            raise RingPatternError(
                f"Dilated: head_offsets: expected one of {', '.join(HEAD_OFFSETS)}, got"
                f" {shown(self.head_offsets)}"
            )

    def branches(self, head: QueryHead) -> tuple[Branch, ...]:
        offsets, least = self.offsets(*head), 0 if self.causal else -UNBOUNDED
        numbers = zip(self.segment_lengths, self.dilation_rates, offsets, strict=True)
        return tuple(equal_labels(Residue(w, r, o), least) for w, r, o in numbers)

    def offsets(self, head: int, query_heads: int, kv_heads: int) -> tuple[int, ...]:
        """Return o(h, i) of every branch."""
        if self.head_offsets == "zero":
            return (0,) * len(self.dilation_rates)
        if self.head_offsets == "torchscale":
            # ceil(H / r) consecutive heads share an offset
            return tuple(head // -(-query_heads // rate) for rate in self.dilation_rates)
        # by the K/V head, all query heads of a group read the same tokens
        index = head if self.head_offsets == "paper" else head // (query_heads // kv_heads)
        return tuple(index % rate for rate in self.dilation_rates)


def _whole_numbers(given: object, name: str) -> tuple[int, ...]:
    """Return the positive integers of a list, or raise RingPatternError."""
    if not isinstance(given, (list, tuple)) or not given:
        raise RingPatternError(f"Dilated: {name}: expected a list of positive integers, got {shown(given)}")
    try:
        return tuple(whole_number(x, name, RingPatternError) for x in given)
    except RingPatternError:
        text = shown(list(given)).removeprefix("list ")
        raise RingPatternError(f"Dilated: {name}: expected positive integers, got {text}") from None


@dataclass(frozen=True)
class HeadShard(Pattern):
    """The pattern of the heads that a Ulysses rank has, numbered from 0 there.

    [Note: numbers of heads]
    The offsets of a dilated pattern depend on the number of a query head among all heads of the model. A
    Ulysses rank has a part of the heads, and uses the same numbers.

    Attributes:
        whole: the pattern of all heads.
        part: which of `parts` equal, consecutive parts of the heads these are.
    """

    whole: Pattern
    part: int
    parts: int

    def branches(self, head: QueryHead) -> tuple[Branch, ...]:
        number = self.part * head.query_heads + head.number
        of_all = QueryHead(number, self.parts * head.query_heads, self.parts * head.kv_heads)
        return self.whole.branches(of_all)

    def __str__(self) -> str:
        return f"{self.whole} (part {self.part} of {self.parts} of the heads)"


@dataclass(frozen=True)
class FirstQueries(Pattern):
    """Let queries at positions below `count` attend to all keys, and later queries to none.

    This is the mask of a recomputation of the first queries, which reuses the results of later ones.
    """

    count: int

    def branches(self, head: QueryHead) -> tuple[Branch, ...]:
        return (Branch(queries=in_range(0, self.count)),)
