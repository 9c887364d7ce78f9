"""Train on two hosts of two ranks, make something fail, and check that `ds-ring launch` continues by itself.

Hosts are network namespaces with a cable and OpenSSH's server, the launcher is called on a login node; under
Slurm its daemons run on the hosts, and the launcher in an allocation (needs the packages openssh-server,
slurmctld, slurmd, slurm-client and munge, and root). Each round is a job of its own: real ranks, real
checkpoints, one fault. A round is good if the job ends with status 0, its losses are those of the run
that was never interrupted (to --tolerance), it went on from the newest checkpoint, and no process is left.
Printed are the seconds from the fault to the next training step.

"leave" ends jobs at random moments under every engine, "launch" launches one run twice at the same instant
(no hosts, no root), "engines" compares the losses under every engine.

Example:
    python tools/campaign.py relaunch --rounds 5
    python tools/campaign.py relaunch --rounds 1 --only "kill a node" --engine deepspeed
    python tools/campaign.py leave --rounds 10
    python tools/campaign.py launch --rounds 100
    python tools/campaign.py engines --tolerance 1e-6
"""

from __future__ import annotations

import tempfile
from argparse import Namespace
from collections.abc import Iterator
from itertools import product
from pathlib import Path

from benchmarks.measuring import ResultRow
from common import ONLY, choose

from tests.dist.launch_rounds import play_rounds
from tests.dist.leave_rounds import PLACES, kill_the_launcher, leave_when_told
from tests.dist.relaunch_rounds import ENGINES, FAULTS, play_round, same_losses_by, uninterrupted

OPTIONS = {
    "only": ONLY, "rounds": (5, "of each fault"), "tolerance": (1e-5, "largest difference of a loss"),
    "engine": ("torchrun", "of relaunch", ("torchrun", "deepspeed", "slurm")),
}  # fmt: skip


def run(options: Namespace) -> Iterator[ResultRow]:
    """Yield a row for each round."""
    faults = choose(options.only, FAULTS)
    with tempfile.TemporaryDirectory(prefix="relaunch-") as name:
        expected = uninterrupted(Path(name, "whole"), options.engine)
        for number, fault in product(range(options.rounds), faults):
            folder = Path(name, f"{fault.replace(' ', '-')}-{number}")
            result = play_round(folder, fault, number, options.engine)
            seconds = {event: round(value, 1) for event, value in result.seconds.items()}
            facts = {key: getattr(result, key) for key in ("world_sizes", "resumed_from", "culprit", "said")}
            wrong = result.wrong(expected, options.tolerance)
            yield ResultRow({"fault": fault, "round": number}, {"seconds": seconds, **facts}, wrong)


def launch_twice(options: Namespace) -> Iterator[ResultRow]:
    """Yield a row for each round."""
    with tempfile.TemporaryDirectory(prefix="launch-") as name:
        for number, wrong in enumerate(play_rounds(Path(name), options.rounds)):
            yield ResultRow({"round": number}, {}, wrong)


def leave(options: Namespace) -> Iterator[ResultRow]:
    """Yield a row for each round, engine and way to end the launcher."""
    acts = {act.__name__: act for act in (leave_when_told, kill_the_launcher)}
    chosen = choose(options.only, sorted({f"{act} {engine}" for act in acts for engine, _ in PLACES}))
    with tempfile.TemporaryDirectory(prefix="leave-") as name:
        for number, (engine, far), act in product(range(options.rounds), PLACES, acts):
            if f"{act} {engine}" in chosen:
                case = {"what": act, "engine": engine, "hosts": 2 if far else 1, "round": number}
                row = acts[act](Path(name, "-".join(map(str, case.values()))), engine, far, number)
                yield ResultRow(case, row, row["wrong"])


def engines(options: Namespace) -> Iterator[ResultRow]:
    """Yield a row for each engine; one whose losses are not the first one's is wrong."""
    with tempfile.TemporaryDirectory(prefix="engines-") as name:
        expected: dict[int, float] = {}
        for number, engine in enumerate(ENGINES):
            losses = same_losses_by(engine, Path(name, str(number)))
            expected = expected or losses
            worst = max(abs(losses.get(step, 1e9) - loss) for step, loss in expected.items())
            is_same = losses.keys() == expected.keys() and worst <= options.tolerance
            results = {"steps": len(losses), "largest_difference": worst}
            yield ResultRow({"engine": engine}, results, "" if is_same else "other losses")
