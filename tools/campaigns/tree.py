"""Draw trees of rollouts, run layers and models on them on rings, compare with each rollout by itself.

A round is one random tree of rollouts (branches within answers, equal ones, prefixes of others) for an
operator in float64 or a small model of transformers in float32, on gloo rings of 1 to 4 ranks. Outputs (of
models log-probabilities) of each rollout and all gradients are compared with one process that computes each
rollout by itself: 1e-10 for operators, 2e-5 for models (`tests/dist/tree_rounds.py`). "refused" counts trees
of fewer tokens than ranks, which RWKV refuses; "rounded" those beyond 2e-5 whose ring is nearer to float64
than one process is. The last rows are the tokens that a layer computes and sends,
for the trees and for their rollouts as rows of their own.

Example:
    python tools/campaign.py tree --rounds 200 --markdown
    python tools/campaign.py tree --rounds 5 --first 1000 --only ALiBi bloom --rings 2 3 --all-rings
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from contextlib import ExitStack

from benchmarks.measuring import ResultRow
from common import ONLY, choose

from tests.dist.harness import RankPool
from tests.dist.tree_rounds import MODELS, OPERATORS, Tokens, play, tokens_of

from . import count_row

AT_ONCE = 40  # trees, of which the ranks of a ring are given their part in one call
OPTIONS = {
    "only": ONLY, "rounds": (200, "trees of each operator and model"),
    "first": (0, "the seed of the first tree"),
    "rings": ([1, 2, 3, 4], "ring sizes, which take turns"),
    "all_rings": (False, "each tree on all ring sizes"),
}  # fmt: skip


def run(options: Namespace) -> Iterator[ResultRow]:
    """Yield a row for each operator and model, then the tokens of each ring."""
    names = choose(options.only, [*OPERATORS, *MODELS])
    seeds = range(options.first, options.first + options.rounds)
    turns = 1 if options.all_rings else len(options.rings)
    with ExitStack() as stack:
        pools = [stack.enter_context(RankPool(size)) for size in options.rings]
        for name in names:
            rounds = [
                result
                for first in range(0, len(seeds), AT_ONCE)
                for number, pool in enumerate(pools)
                for result in play(name, seeds[first : first + AT_ONCE][number % turns :: turns], pool)
            ]
            errors = (max(result[at] for result in rounds) for at in (0, 1))
            counts: dict[str, object] = {"rounds": len(rounds)}
            counts |= {key: sum(getattr(result, key) for result in rounds) for key in ("refused", "rounded")}
            counts |= zip(("outputs", "gradients"), (f"{error:.1e}" for error in errors), strict=True)
            faults = [result.wrong for result in rounds if result.wrong]
            yield count_row({"part": "errors", "of": name}, counts, faults)
    for size in options.rings:
        pairs = [tokens_of(seed, size) for seed in seeds]  # of all trees
        for at, kind in enumerate(("trees", "rows")):
            total = sum((pair[at] for pair in pairs), Tokens())
            yield ResultRow({"part": "tokens", "ring": size, "of": kind}, total._asdict())
