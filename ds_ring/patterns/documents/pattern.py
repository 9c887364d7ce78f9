"""Documents that are packed into one sequence, and trees of nodes that share prefixes: tables of labels."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from ds_ring.errors import RingPatternError, check_whole_number, shown
from ds_ring.masks.branches import Branch, labelled, match_labels
from ds_ring.masks.catalog import Causal, Chunked, SlidingWindow
from ds_ring.masks.pattern import Pattern, QueryHead, check_numbers
from ds_ring.masks.slots import IntArray
from ds_ring.masks.tiles import UNBOUNDED
from ds_ring.patterns.documents.table import Table


@dataclass(frozen=True)
class Documents(Pattern):
    """Attend within one document only; a negative id marks padding, which sees nothing.

    Attributes:
        starts, ids, tokens: runs of equal ids, as in `Table`.
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
            raise RingPatternError(f"Documents: expected document_ids or position_ids, got {got}; give one")
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
        return (match_labels(self._table),)

    def __str__(self) -> str:
        # tuples of ints have the same hash in every process, and ranks compare this text
        digest = hash((self.starts, self.ids))
        return f"Documents({len(self.starts)} runs, {self.tokens} tokens, {digest})"


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
    forest has several roots. Distances along a path differ from distances in the sequence: give a window here
    instead of combining a tree with one.

    Attributes:
        parents: the number of each node's parent, below the node's own; -1 for a root.
        lengths: tokens of each node.
        tokens: length T of the sequence; None is the sum of the lengths. Tokens after the last node are
            padding, which attends to nothing.
        window: tokens of its path that a token sees, its own included; None for all.

    Raises:
        RingPatternError: no node, other numbers of parents and lengths, a parent that does not come before
            its node, a length or window below 1, or fewer tokens than the nodes have.
    """

    parents: tuple[int, ...]
    lengths: tuple[int, ...]
    tokens: int | None = None
    window: int | None = None

    def __post_init__(self) -> None:
        for name in ("parents", "lengths"):
            numbers = _one_sequence(getattr(self, name), f"Tree: {name}").tolist()
            object.__setattr__(self, name, tuple(numbers))
        if len(self.parents) != len(self.lengths):
            raise RingPatternError(
                f"Tree: expected a parent and a length for each node, got {len(self.parents)} parents and"
                f" {len(self.lengths)} lengths"
            )
        for node, (parent, length) in enumerate(zip(self.parents, self.lengths, strict=True)):
            if not -1 <= parent < node or length < 1:
                raise RingPatternError(
                    f"Tree: node {node}: expected a parent from -1 (a root) to {node - 1} and a length of at"
                    f" least 1, got parent {parent} and length {length}; put each node after its parent"
                )
        total = sum(self.lengths)
        tokens = (
            total
            if self.tokens is None
            else check_whole_number(self.tokens, "Tree: tokens", RingPatternError)
        )
        if tokens < total:
            raise RingPatternError(f"Tree: expected at least the {total} tokens of the nodes, got {tokens}")
        object.__setattr__(self, "tokens", tokens)
        if self.window is not None:
            check_numbers(self, "window")

    def narrowed(self, layer_pattern: Pattern) -> Tree:
        """Return the tree with the pattern that a layer asks for along each path: causal, windows, chunks.

        Raises:
            RingPatternError: another pattern.
        """
        windows, chunk = [] if self.window is None else [self.window], None
        for part in layer_pattern.conjuncts:
            if isinstance(part, SlidingWindow) and part.causal:
                windows.append(part.window)
            elif isinstance(part, Chunked) and part.causal and chunk in (None, part.chunk):
                chunk = part.chunk
            elif part != Causal():
                expected = "Causal(), a causal SlidingWindow or Chunked with a tree of rollouts"
                raise RingPatternError.wrong(
                    "a layer", expected, str(layer_pattern), "pass the rollouts as rows"
                )
        tree = self if chunk is None else self._in_chunks(chunk)
        return replace(tree, window=min(windows)) if windows else tree

    def _in_chunks(self, size: int) -> Tree:
        """Return the forest whose paths are the chunks of this tree's: each chunk begins at a root."""
        parents, lengths, last = list[int](), list[int](), list[int]()  # the last piece of each node
        for start, parent, length in zip(self.starts.tolist(), self.parents, self.lengths, strict=False):
            above, depth = last[parent] if parent >= 0 else -1, int(self.depths[start])
            end = depth + length
            while depth < end:
                parents.append(above if depth % size else -1)
                lengths.append(min(end - depth, size - depth % size))
                above, depth = len(parents) - 1, depth + lengths[-1]
            last.append(above)
        return replace(self, parents=tuple(parents), lengths=tuple(lengths))

    @cached_property
    def starts(self) -> IntArray:
        """Return the first position of each node, and the end of the last one; int64 [nodes + 1]."""
        return np.cumsum([0, *self.lengths])

    @cached_property
    def depths(self) -> IntArray:
        """Return the number of each token in its path, int64 [T]; 0 for padding."""
        depths, ends = np.zeros(self.tokens or 0, dtype=np.int64), list[int]()
        for node, (parent, length) in enumerate(zip(self.parents, self.lengths, strict=True)):
            first = 0 if parent < 0 else ends[parent]
            depths[self.starts[node] : self.starts[node + 1]] = np.arange(first, first + length)
            ends.append(first + length)
        return depths

    @property
    def pairs(self) -> int:
        """Return the number of pairs of a query and a key, a window apart."""
        return int((self.depths[: self.starts[-1]] + 1).sum())

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
        # Distances along a path differ from those in the sequence by a shift for each pair of nodes. With a
        # window a level has a branch for each shift, with a band that is moved by it.
        first = self.depths[self.starts[:-1]]
        shifts = (first - self.starts[:-1]).tolist() if self.window is not None else [0] * len(level)
        labels: dict[tuple[int, int], list[int]] = {}  # of queries by level and shift
        for node, path in enumerate(nodes_above):
            for number, above in enumerate(path):
                # the distance of the node's first token from the last one of that level
                nearest = int(first[node] - first[path[number + 1]]) + 1 if number + 1 < len(path) else 0
                if self.window is None or nearest < self.window:
                    key = number, shifts[node] - shifts[above]
                    labels.setdefault(key, [-1] * len(level))[node] = above
        starts = tuple(self.starts[: -1 if self.starts[-1] == self.tokens else None].tolist())
        padding = (-1,) * (len(starts) - len(level))
        branches = []
        for (number, shift), queries in sorted(labels.items()):
            keys = [
                path[-1] if label == number else -1 for path, label in zip(nodes_above, level, strict=True)
            ]
            of_queries, of_keys = (
                labelled(Table(starts, (*ids, *padding), self.tokens or 0)) for ids in (queries, keys)
            )
            most = UNBOUNDED if self.window is None else self.window - 1 - shift
            branches.append(Branch(of_queries, of_keys, least=0, most=most))
        return tuple(branches)

    def branches(self, head: QueryHead) -> tuple[Branch, ...]:
        return self._levels

    def __str__(self) -> str:
        # tuples of ints have the same hash in every process, and ranks compare this text
        digest = hash((self.parents, self.lengths, self.window or 0))
        window = "" if self.window is None else f", windows of {self.window}"
        return f"Tree({len(self.parents)} nodes of {self.tokens} tokens{window}, {digest})"
