"""Sums along one binary tree, whatever the order in which the leaves come."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Generic, TypeVar

import numpy as np

from ds_ring.masks.slots import IntArray

T = TypeVar("T")
Node = tuple[int, int]  # level k and number i of a tree: leaves i * 2^k to (i + 1) * 2^k - 1


class TreeSum(Generic[T]):
    """Add leaves in any order along one binary tree.

    Args:
        leaves: numbers of the leaves that the whole tree has, ascending.
        add: of what is left and right; a node without leaves on one side is the other side.
    """

    def __init__(self, leaves: IntArray, add: Callable[[T, T], T]) -> None:
        self._leaves, self._add = leaves, add
        self._top = int(leaves[-1]).bit_length() if len(leaves) else 0
        self.nodes: dict[Node, T] = {}

    def insert(self, node: Node, value: T) -> None:
        """Add a leaf (0, i), or a node that is complete."""
        level, number = node
        while level < self._top:
            first = (number ^ 1) << level
            low, high = np.searchsorted(self._leaves, (first, first + (1 << level)))
            if low < high:
                sibling = self.nodes.pop((level, number ^ 1), None)
                if sibling is None:
                    break
                value = self._add(sibling, value) if number & 1 else self._add(value, sibling)
            level, number = level + 1, number >> 1
        self.nodes[level, number] = value

    @property
    def total(self) -> T | None:
        """Return the sum; None without leaves."""
        assert len(self.nodes) < 2, "leaves are missing"
        return next(iter(self.nodes.values()), None)


@lru_cache(maxsize=1 << 14)
def nodes_left(leaves: tuple[int, ...], local: tuple[int, ...]) -> tuple[Node, ...]:
    """Return the nodes that remain where a rank has some of a tree's leaves."""
    tree = TreeSum[bool](np.array(leaves), lambda left, right: True)
    for leaf in local:
        tree.insert((0, leaf), True)
    return tuple(sorted(tree.nodes))
