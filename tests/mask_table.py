"""The registry of masks: each as a pattern, and once more as a plain formula of positions.

Owns the table that `tests/dist/test_registry.py` runs on kernels, layouts and ring sizes. A formula gives m
of a pair by the numbers of query, key and head and shares no code with `ds_ring/masks`. A new mask is a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ds_ring import Causal, Chunked, DilatedWindow, Documents, Full, PrefixLM, Sinks, SlidingWindow, Tree
from ds_ring.masks.branches import Branch, Remainder, Segment, in_range, labelled
from ds_ring.masks.pattern import Pattern, QueryHead
from tests.cases import rows_of

TOKENS = 93
HEADS, KV_HEADS = 4, 2
Formula = Callable[[np.ndarray, np.ndarray, int], Any]

PACKED = np.repeat([0, 1, 2, 3, 4], [11, 30, 7, 25, 20])  # documents one after the other
MIXED = np.random.default_rng(5).integers(-1, 4, TOKENS)  # every token by itself; -1 is padding


def three_apart(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q - k) % 3 != 1


def by_head(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q + k) % (h + 2) != 0


@dataclass(frozen=True)
class EvenSegments(Pattern):
    """What a user adds: within segments, tokens of equal parity, no key after its query. Nothing else."""

    length: int

    def branches(self, head: QueryHead) -> tuple[Branch, ...]:
        both = labelled(Segment(self.length)) & labelled(Remainder(2))
        return (Branch(both, both, least=0), Branch(in_range(0, 5), in_range(60, 70), most=-1))


def dilated(q: np.ndarray, k: np.ndarray, lengths: Any, rates: Any, offsets: Any) -> np.ndarray:
    """m by the words of the paper: branch by branch, same segment and both on the offset."""
    total = np.zeros(np.broadcast_shapes(q.shape, k.shape), dtype=int)
    for w, r, o in zip(lengths, rates, offsets, strict=True):
        total = total + ((q // w == k // w) & (q % w % r == o) & (k % w % r == o))
    return total


# two roots; node 5 goes on with node 4 alone; node 6 lies behind other nodes than its parent's; 5 are padding
PARENTS, LENGTHS = (-1, 0, 1, 1, 0, 4, 2, 5, -1, 8, 8), (17, 9, 8, 1, 6, 7, 10, 5, 11, 6, 8)


def of_tree(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """Walk up from each query's node: does the key's node lie on the way?"""
    node = np.append(np.repeat(np.arange(len(LENGTHS)), LENGTHS), [-1] * 5)
    found, at, key = np.zeros(np.broadcast_shapes(q.shape, k.shape), dtype=bool), node[q], node[k]
    parents = np.array((*PARENTS, -1))
    while (at >= 0).any():
        found |= (at == key) & (at >= 0)
        at = np.where(at >= 0, parents[at], -1)
    return found & (k <= q)


def inside(q: np.ndarray, k: np.ndarray, q0: int, q1: int, k0: int, k1: int) -> np.ndarray:
    return (q0 <= q) & (q < q1) & (k0 <= k) & (k < k1)


def diffusion(q: np.ndarray, k: np.ndarray, block: int, tokens: int) -> np.ndarray:
    """A clean block sees clean ones up to itself, a corrupted one those before it and itself."""
    q_block, k_block = q % tokens // block, k % tokens // block
    clean = (k < tokens) & (k_block < q_block + (q < tokens))
    return (
        (clean | ((q >= tokens) & (k >= tokens) & (q_block == k_block))) & (q < 2 * tokens) & (k < 2 * tokens)
    )


class Mask(NamedTuple):
    """A pattern, and m(q, k) for query head h."""

    pattern: Pattern
    formula: Formula


N, P3 = (8, 16, 64), (1, 2, 4)
SLICES = (((0, 30), (0, 40), "causal"), ((30, 93), (0, 20), "full"), ((30, 80), (20, 90), "bi-causal"))

MASKS: dict[str, Mask] = {
    "full": Mask(Full(), lambda q, k, h: (q >= 0) & (k >= 0)),
    "causal": Mask(Causal(), lambda q, k, h: k <= q),
    "window": Mask(SlidingWindow(13), lambda q, k, h: (k <= q) & (q - k < 13)),
    "window both ways": Mask(SlidingWindow(9, False), lambda q, k, h: abs(q - k) < 9),
    "documents": Mask(Documents(PACKED) & Causal(), lambda q, k, h: (PACKED[q] == PACKED[k]) & (k <= q)),
    "documents mixed": Mask(Documents(MIXED), lambda q, k, h: (MIXED[q] == MIXED[k]) & (MIXED[q] >= 0)),
    "prefix": Mask(PrefixLM(17), lambda q, k, h: (k <= q) | ((q < 17) & (k < 17))),
    "prefix & documents": Mask(PrefixLM(20) & Documents(PACKED), lambda q, k,
        h: ((k <= q) | ((q < 20) & (k < 20))) & (PACKED[q] == PACKED[k])),
    "sinks": Mask(Sinks(5), lambda q, k, h: (k <= q) & (k < 5)),
    "sinks | window": Mask(SlidingWindow(12) | Sinks(4), lambda q, k, h: (k <= q) & ((q - k < 12) | (k < 4))),
    "sinks | window both ways": Mask(Sinks(3, False) | SlidingWindow(8, False), lambda q, k,
        h: (abs(q - k) < 8) | (k < 3)),
    "chunked": Mask(Chunked(20), lambda q, k, h: (q // 20 == k // 20) & (k <= q)),
    "chunked both ways": Mask(Chunked(31, False), lambda q, k, h: q // 31 == k // 31),
    "chunked & window": Mask(Chunked(20) & SlidingWindow(6), lambda q, k,
        h: (q // 20 == k // 20) & (k <= q) & (q - k < 6)),
    "dilated window": Mask(DilatedWindow(6, 4), lambda q, k, h: (k <= q) & ((q - k) % 4 == 0) & (q - k < 24)),
    "dilated window both ways": Mask(DilatedWindow(5, 3, False), lambda q, k,
        h: ((q - k) % 3 == 0) & (abs(q - k) <= 12)),
    "dilated window | sinks": Mask(DilatedWindow(7, 2) | Sinks(4), lambda q, k,
        h: (k <= q) & ((k < 4) | (((q - k) % 2 == 0) & (q - k < 13)))),
    "documents | window": Mask(Documents(PACKED) & Causal() | SlidingWindow(5), lambda q, k,
        h: (k <= q) & ((PACKED[q] == PACKED[k]) | (q - k < 5))),
    "tree": Mask(Tree(PARENTS, LENGTHS, TOKENS), lambda q, k, h: of_tree(q, k)),
    "defined once": Mask(EvenSegments(24), lambda q, k,
        h: ((q // 24 == k // 24) & ((q - k) % 2 == 0) & (k <= q)) | inside(q, k, 0, 5, 60, 70)),
    **rows_of(
        "Dilated",
        lambda dilated_of: {
            "dilated": Mask(dilated_of(N, P3), lambda q, k,
                h: dilated(q, k, N, P3, [h % r for r in P3]) * (k <= q)),
            "dilated, not nested": Mask(dilated_of((15, 42), (3, 5), False, "zero"), lambda q, k,
                h: dilated(q, k, (15, 42), (3, 5), (0, 0))),
            "dilated, irregular": Mask(dilated_of((7, 20, 50), (1, 2, 4)), lambda q, k,
                h: dilated(q, k, (7, 20, 50), (1, 2, 4), [h % r for r in (1, 2, 4)]) * (k <= q)),
            "dilated & window": Mask(dilated_of(N, P3) & SlidingWindow(21), lambda q, k,
                h: dilated(q, k, N, P3, [h % r for r in P3]) * ((k <= q) & (q - k < 21))),
            "dilated & documents": Mask(dilated_of(N, P3) & Documents(PACKED), lambda q, k,
                h: (dilated(q, k, N, P3, [h % r for r in P3]) * ((k <= q) & (PACKED[q] == PACKED[k])))),
            "dilated twice": Mask(
                dilated_of(N, P3, False, "zero") & dilated_of((10, 40), (1, 3), True, "zero"),
                lambda q, k, h: (
                    dilated(q, k, N, P3, (0, 0, 0)) * dilated(q, k, (10, 40), (1, 3), (0, 0)) * (k <= q)
                ),
            ),
        },
    ),
    **rows_of(
        "MaskMod",
        lambda mask_mod: {
            "mask function": Mask(SlidingWindow(40) & mask_mod(three_apart), lambda q, k,
                h: ((q - k) % 3 != 1) & (k <= q) & (q - k < 40)),
            "mask function by head": Mask(mask_mod(by_head) & SlidingWindow(30), lambda q, k,
                h: ((q + k) % (h + 2) != 0) & (k <= q) & (q - k < 30)),
            "mask function | window": Mask(mask_mod(three_apart) & Causal() | SlidingWindow(10), lambda q, k,
                h: (((q - k) % 3 != 1) | (q - k < 10)) & (k <= q)),
        },
    ),
    **rows_of(
        "BlockDiffusion",
        lambda block_diffusion: {
            "block diffusion": Mask(block_diffusion(7, 46, padding=1), lambda q, k,
                h: diffusion(q, k, 7, 46)),
        },
    ),
    **rows_of(
        "Drafter",
        lambda drafter: {
            "drafter at each token": Mask(drafter(31, 2), lambda q, k,
                h: np.where(k < 31, k <= q % 31, (q % 31 == k % 31) & (k <= q))),
        },
    ),
    **rows_of(
        "Slices",
        lambda slices: {
            "slices, full": Mask(slices((((10, 60), (5, 33), "full"),)), lambda q, k,
                h: inside(q, k, 10, 60, 5, 33)),
            "slices, causal": Mask(slices((((10, 60), (5, 80), "causal"),)), lambda q, k,
                h: inside(q, k, 10, 60, 5, 80) & (k - 80 <= q - 60)),
            "slices, inverse-causal": Mask(slices((((10, 60), (25, 80), "inverse-causal"),)), lambda q, k,
                h: inside(q, k, 10, 60, 25, 80) & (k - 25 >= q - 10)),
            "slices, bi-causal": Mask(slices((((10, 60), (5, 80), "bi-causal"),)), lambda q, k,
                h: inside(q, k, 10, 60, 5, 80) & (k - 80 <= q - 60) & (k - 5 >= q - 10)),
            "slices together": Mask(
                slices(SLICES),
                lambda q, k, h: (
                    (inside(q, k, 0, 30, 0, 40) & (k - q <= 10))
                    | inside(q, k, 30, 93, 0, 20)
                    | (inside(q, k, 30, 80, 20, 90) & (k - q <= 10) & (k - q >= -10))
                ),
            ),
            "slices | window": Mask(
                slices(SLICES) & Causal() | SlidingWindow(7),
                lambda q, k, h: (
                    (k <= q)
                    & (
                        (q - k < 7)
                        | inside(q, k, 0, 30, 0, 40)
                        | inside(q, k, 30, 93, 0, 20)
                        | (inside(q, k, 30, 80, 20, 90) & (q - k <= 10))
                    )
                ),
            ),
        },
    ),
    **rows_of(
        "Dilated",
        lambda dilated_of: rows_of(
            "MaskMod",
            lambda mask_mod: {
                "mask function & dilated": Mask(mask_mod(by_head) & dilated_of(N, P3), lambda q, k,
                    h: (((q + k) % (h + 2) != 0) * dilated(q, k, N, P3, [h % r for r in P3]) * (k <= q))),
            },
        ),
    ),
}  # fmt: skip


def dense(name: str) -> np.ndarray:
    """m of every pair by the formula, int64 [HEADS, TOKENS, TOKENS]."""
    q, k = np.arange(TOKENS)[:, None], np.arange(TOKENS)[None, :]
    counts = (np.asarray(MASKS[name].formula(q, k, head)) for head in range(HEADS))
    return np.stack([np.broadcast_to(count, (TOKENS, TOKENS)).astype(np.int64) for count in counts])
