"""Compare an operator over a sharded sequence with a float64 reference of one process, token by token."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ds_ring import Documents, Tree

T = 46
IDS = [0] * 5 + [1] * 6 + [2] * 2 + [3] * 20 + [4] * 7 + [-1] * 6
TREE = Tree((-1, 0, 1, 1, 0, 4, -1), (9, 5, 1, 7, 3, 8, 6), T)  # the last 7 tokens are padding

# (world size, layout, Ulysses size) of the tables
RINGS = [
    (1, "zigzag", 1), (2, "zigzag", 1), (3, "contiguous", 1), (4, "zigzag", 1), (4, "balanced", 1),
    (4, "zigzag", 2),
]  # fmt: skip


def documents_of(kind: str) -> Documents | Tree | None:
    return {"whole": None, "packed": Documents(IDS), "tree": TREE}[kind]


def tokens_before(kind: str) -> list[int]:
    """Return the position of the token before each one in its document, or on its path; -1 for none."""
    result = [t - 1 for t in range(T)]
    if kind == "packed":
        return [t - 1 if t and IDS[t - 1] == IDS[t] else -1 for t in range(T)]
    if kind == "tree":
        for node, parent in enumerate(TREE.parents):
            result[TREE.starts[node]] = int(TREE.starts[parent + 1]) - 1 if parent >= 0 else -1
        result[TREE.starts[-1]] = -1
    return result


def real_tokens(kind: str) -> Tensor:
    """Return 1 for each token, and 0 for padding behind a tree, [T]."""
    return (torch.arange(T) < (int(TREE.starts[-1]) if kind == "tree" else T)).double()


def path_of(kind: str, t: int) -> list[int]:
    """Return the positions of the tokens of a document, or path, up to t."""
    before, result = tokens_before(kind), [t]
    while before[result[-1]] >= 0:
        result.append(before[result[-1]])
    return result[::-1]


def drawn(shapes: dict[str, tuple[int, ...]], seed: int = 0) -> dict[str, Tensor]:
    """Return normal numbers of these shapes, float64."""
    draw = np.random.default_rng(seed)
    return {name: torch.from_numpy(draw.normal(size=shape)) for name, shape in shapes.items()}
