"""Draw packs of documents as MagiAttention's benchmark does.

Its sampler is the class DatasetSampler of its benchmark.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from published.table import Documents, published

LONGEST_PART = 4  # no document is longer than this part of a pack
PACKS = 20  # over which a figure is averaged
# Which 20 packs are drawn decides their work: the mean of 20 may be a quarter off that of all. These seeds
# draw packs that have, by mean and deviation, the work of those that their sampler draws (seed 42): 3,605,
# 6,379, 9,030 and 11,386 keys a query at 8, 16, 32 and 64 devices of 8 Ki tokens.
SEEDS = {65536: 141, 131072: 53, 262144: 4, 524288: 24}


@lru_cache(maxsize=8)
def get_packs(tokens: int) -> tuple[tuple[int, ...], ...]:
    """Return the lengths of the documents of each of the packs that a figure is the mean of."""
    return draw_packs(published().documents, tokens, PACKS, SEEDS.get(tokens, 0))


def draw_packs(documents: Documents, tokens: int, count: int, seed: int) -> tuple[tuple[int, ...], ...]:
    """Return packs of documents as long as the middle of their bins.

    Long ones are split before they are mixed. Where one does not fit a pack, its rest begins the next one.
    """
    ends = sorted(documents.share)
    starts = [1 + end for end in (-1, *ends[:-1])]
    most, parts, weights = tokens // LONGEST_PART, [], []
    for start, end in zip(starts, ends, strict=True):
        length = (start + end) // 2
        for part, times in ((most, length // most), (length % most, 1)):
            if part and times:
                parts.append(part)
                weights.append(times * documents.share[end])
    chance = np.array(weights) / sum(weights)
    generator = np.random.default_rng(seed)
    packs: list[tuple[int, ...]] = []
    pack: list[int] = []
    left = tokens
    while len(packs) < count:
        rest = int(generator.choice(parts, p=chance))
        while rest:
            part = min(rest, left)
            pack.append(part)
            rest, left = rest - part, left - part
            if not left:
                packs.append(tuple(pack))
                pack, left = [], tokens
    return tuple(packs[:count])
