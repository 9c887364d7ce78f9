"""Draw sequences of calls of a compiled function on ranks; each call is equal to the eager one, or refused.

The calls of a round differ in captured numbers and tensors, documents, layouts, options and meshes
(`tests/dist/compiled_rounds.py`). Rounds take the backends in turns.

Example:
    python tools/campaign.py compile --rounds 200
    python tools/campaign.py compile --rounds 20 --first 1000 --only inductor
"""

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from collections.abc import Iterator

from benchmarks.measuring import ResultRow
from common import ONLY, choose

from tests.dist.compiled_rounds import BACKENDS, play
from tests.dist.harness import RankPool

from . import count_row

OPTIONS = {
    "only": ONLY, "rounds": (200, "of all backends together"), "first": (0, "the seed of the first round"),
    "ranks": (2, "of a round"),
}  # fmt: skip


def run(options: Namespace) -> Iterator[ResultRow]:
    """Yield a row for each backend."""
    backends = choose(options.only, BACKENDS)
    with RankPool(options.ranks) as pool:
        for number, backend in enumerate(backends):
            counts, faults = Counter[str](), []
            for seed in range(options.first + number, options.first + options.rounds, len(backends)):
                outcomes = pool.collect(play, seed, backend, timeout_s=600)
                answers = [outcome.value for outcome in outcomes if outcome.value is not None]
                texts = [text for answer in answers for text in answer.wrong]
                texts += [
                    f"seed {seed}, rank {outcome.rank} {outcome.status}: {outcome.report}"
                    for outcome in outcomes
                    if outcome.value is None
                ]
                faults += ["\n".join(texts[:2])] if texts else []
                counts.update(rounds=1, equal=sum(answer.equal for answer in answers))
                counts.update(refused=sum(len(answer.refused) for answer in answers))
            yield count_row({"backend": backend}, counts, faults)
