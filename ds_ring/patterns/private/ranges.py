"""Ranges of keys as branches: each stretch of queries sees one range of keys.

[Note: ranges as branches]
Blocks of queries that see all keys before them make a staircase, which no band of distances describes. So the
keys are cut where a range begins or ends, and the stretches between the cuts are the leaves of a binary tree.
A range is at most two nodes of each level. A branch has all nodes of one level: the label of a key is its
node, the label of a query is the node that its range has. So n ranges are at most 2 log2(n) branches and
about n rectangles, all of them full: no pair is computed and then masked.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ds_ring.masks.branches import Branch, Partition
from ds_ring.masks.slots import IntArray
from ds_ring.patterns.documents.table import Table

# Stretches of private tokens: (first position, tokens, position in the shared sequence).
Stretches = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class PrivateTable(Table):
    """Label private tokens, whose keys only queries of equal label read; a layout keeps these together.

    Attributes:
        shared: the range of positions of the shared sequence.
        stretches: where private tokens are, and where in the shared sequence they belong.
        whole: a stretch stays on one rank; or else token i of each belongs to i positions after its place.
    """

    shared: tuple[int, int] = (0, 0)
    stretches: Stretches = ()
    whole: bool = True


def label_ranges(ranges: IntArray, ids: IntArray, tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the starts and ids of a table that labels disjoint ranges, int64 [n, 2]; others are -1."""
    starts = np.concatenate([[0], ranges[:, 1], ranges[:, 0]])
    values = np.concatenate([[-1], np.full(len(ranges), -1), ids])
    # where a range begins at the end of another one, its own id comes last
    order = np.argsort(starts, kind="stable")
    starts, values = starts[order], values[order]
    last = np.append(starts[1:] != starts[:-1], True) & (starts < tokens)
    starts, values = starts[last], values[last]
    changes = np.append(True, values[1:] != values[:-1])
    return tuple(starts[changes].tolist()), tuple(values[changes].tolist())


def seen_ranges(queries: IntArray, keys: IntArray, tokens: int) -> tuple[Branch, ...]:
    """Return the branches of disjoint stretches of queries that each see one range of keys.

    Args:
        queries: first position and end of each stretch, int64 [n, 2].
        keys: first position and end of what it sees, int64 [n, 2]; empty for none.
        tokens: of the whole sequence.
    """
    seeing = keys[:, 1] > keys[:, 0]
    queries, keys = queries[seeing], keys[seeing]
    if not len(keys):
        return ()
    cuts = np.unique(keys)
    low, high = (np.searchsorted(cuts, keys[:, side]) for side in (0, 1))
    leaves = np.stack([cuts[:-1], cuts[1:]], axis=1)
    everywhere = Partition(int(cuts[0]), int(cuts[-1]))
    branches, level = list[Branch](), 0
    while (low < high).any():
        of_keys = Table(*label_ranges(leaves, np.arange(len(leaves)) >> level, tokens), tokens)
        # the first node, if it is a right child, and the last one, if it is a left child
        first = np.where((low < high) & (low % 2 == 1), low, -1)
        low = low + (first >= 0)
        last = np.where((low < high) & (high % 2 == 1), high - 1, -1)
        high = high - (last >= 0)
        for nodes in (first, last):
            if (nodes >= 0).any():
                of_queries = Table(*label_ranges(queries, nodes, tokens), tokens)
                inside = Partition(everywhere.first, everywhere.end, (of_keys,))
                branches.append(Branch(Partition(primitives=(of_queries,)), inside))
        low, high, level = low // 2, high // 2, level + 1
    return tuple(branches)
