"""Ranks are killed, stopped, crash, leave, sleep or send the wrong thing: does every survivor say who it was?

Real processes over gloo: attention alone (and the start before it), a DeepSpeed training step, or parts of
a DeepSpeed run outside the ring: step, backward's collectives, checkpoints, loader, start, at ZeRO 0 to 3
(one stage a round). Mode "late" has a rank that sleeps, or leaves with status 0, at every place outside of
a pass. A round is good if every survivor ends with a typed error that names the culprit, in
time, or, where its collective is none of ours, with the culprit first (or last, where it ended itself) in
its log; and no process hangs.

Example:
    python tools/campaign.py fault --rounds 10
    python tools/campaign.py fault --rounds 10 --mode deepspeed --only kill stop
    python tools/campaign.py fault --rounds 4 --mode outside
"""

from __future__ import annotations

import statistics
from argparse import Namespace
from collections.abc import Iterator

from benchmarks.measuring import ResultRow
from common import ONLY, choose

from tests.dist.campaign import Round, Zygote, play
from tests.dist.faults import KINDS, LATE, OUTSIDE, WHILE_STARTING

from . import count_row

FAULTS = {
    "attention": (*KINDS, *WHILE_STARTING), "deepspeed": KINDS, "outside": tuple(OUTSIDE),
    "late": tuple(LATE),
}  # fmt: skip
OPTIONS = {
    "only": ONLY, "rounds": 10, "mode": ("attention", "where ranks fail", tuple(FAULTS)),
}  # fmt: skip


def run(options: Namespace) -> Iterator[ResultRow]:
    """Yield a row for each fault."""
    names = choose(options.only, FAULTS[options.mode])
    zygote = Zygote(options.mode)
    for name in names:
        rounds = [play(zygote, Round(name, options.mode, turn))[0] for turn in range(options.rounds)]
        times = [verdict.seconds for verdict in rounds]
        counts = {"rounds": len(rounds), "median_s": round(statistics.median(times), 2)}
        counts["slowest_s"] = round(max(times), 2)
        faults = [verdict.wrong for verdict in rounds if verdict.wrong]
        yield count_row({"fault": name, "mode": options.mode}, counts, faults)
    zygote.close()
