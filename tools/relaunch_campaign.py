"""Train on two hosts of two ranks, make something fail, and check that `ds-ring launch` continues by itself.

Hosts are network namespaces with a cable and OpenSSH's server, the launcher is called on a login node; under
Slurm its daemons run on the hosts, and the launcher in an allocation (needs the packages openssh-server,
slurmctld, slurmd, slurm-client and munge, and root). Each round is a job of its own: real ranks, real
checkpoints, one fault. A round is good if the job ends with status 0, its losses are those of the run
that was never interrupted (to --tolerance), it went on from the newest checkpoint, and no process is left.
Printed are the seconds from the fault to the next training step.

Example:
    python tools/relaunch_campaign.py --rounds 5
    python tools/relaunch_campaign.py --leave --rounds 10
    python tools/relaunch_campaign.py --twice --rounds 100
    python tools/relaunch_campaign.py --engines --tolerance 1e-6
    python tools/relaunch_campaign.py --rounds 1 --only "kill a node" --engine deepspeed
"""

from __future__ import annotations

import itertools
import sys
import tempfile
import time
from pathlib import Path

from common import parser_of, print_row

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the tests' hosts

from tests.dist.launch_rounds import play_rounds
from tests.dist.leave_rounds import PLACES, kill_the_launcher, leave_when_told
from tests.dist.relaunch_rounds import ENGINES, FAULTS, play_round, same_losses_by, uninterrupted


def main(arguments: list[str] | None = None) -> int:
    """Print a row per round; the exit code is the number of bad rounds, 100 at most."""
    parser = parser_of(
        __doc__, rounds=(5, "of each fault"), tolerance=(1e-5, "largest difference of a loss"),
        engines=(False, "compare the losses under every engine instead"),
        leave=(False, "SIGTERM and kill -9 of the launcher instead"),
        twice=(False, "two launches of one run at the same instant instead: no hosts, no root"),
    )  # fmt: skip
    parser.add_argument("--only", nargs="*", default=[], help="rounds whose name contains one of these")
    parser.add_argument("--engine", choices=("torchrun", "deepspeed", "slurm"), default="torchrun")
    options = parser.parse_args(arguments)
    bad, started = 0, time.monotonic()
    if options.leave:
        return _leave(options.rounds, options.only)
    if options.twice:
        return _launch_twice(options.rounds)
    if options.engines:
        return _compare_engines(options.tolerance)
    with tempfile.TemporaryDirectory(prefix="relaunch-") as name:
        expected = uninterrupted(Path(name, "whole"), options.engine)
        for number in range(options.rounds):
            for fault in FAULTS:
                if options.only and not any(part in fault for part in options.only):
                    continue
                folder = Path(name, f"{fault.replace(' ', '-')}-{number}")
                found = play_round(folder, fault, number, options.engine)
                wrong = found.wrong(expected, options.tolerance)
                bad += bool(wrong)
                row = {"fault": fault, "round": number}
                row["seconds"] = {name: round(value, 1) for name, value in found.seconds.items()}
                names = ("world_sizes", "resumed_from", "culprit", "said")
                print_row(row | {name: getattr(found, name) for name in names} | {"wrong": wrong})
    print(f"{bad} bad rounds, {time.monotonic() - started:.0f} s", flush=True)
    return min(bad, 100)


def _launch_twice(rounds: int) -> int:
    with tempfile.TemporaryDirectory(prefix="launch-") as name:
        found = play_rounds(Path(name), rounds)
    for number, wrong in enumerate(found):
        print_row({"round": number, "wrong": wrong})
    return min(sum(map(bool, found)), 100)


def _leave(rounds: int, only: list[str]) -> int:
    """End jobs at random moments under every engine; return how many rounds are bad."""
    bad = 0
    with tempfile.TemporaryDirectory(prefix="leave-") as name:
        for number, (engine, far), act in itertools.product(
            range(rounds), PLACES, (leave_when_told, kill_the_launcher)
        ):
            what = {"what": act.__name__, "engine": engine, "hosts": 2 if far else 1, "round": number}
            if only and not any(part in f"{act.__name__} {engine}" for part in only):
                continue
            row = act(Path(name, "-".join(map(str, what.values()))), engine, far, number)
            bad += bool(row["wrong"])
            print_row({**what, **row})
    return min(bad, 100)


def _compare_engines(tolerance: float) -> int:
    """Run one YAML under every engine; return how many have other losses than the first."""
    found: dict[str, dict[int, float]] = {}
    with tempfile.TemporaryDirectory(prefix="engines-") as name:
        for number, engine in enumerate(ENGINES):
            started = time.monotonic()
            found[engine] = losses = same_losses_by(engine, Path(name, str(number)))
            expected = found[ENGINES[0]]
            worst = max(abs(losses.get(step, 1e9) - loss) for step, loss in expected.items())
            row = {"engine": engine, "steps": len(losses), "largest_difference": worst}
            print_row(row | {"seconds": round(time.monotonic() - started)})
    expected = found[ENGINES[0]]
    return sum(
        losses.keys() != expected.keys() or any(abs(losses[s] - expected[s]) > tolerance for s in expected)
        for losses in found.values()
    )


if __name__ == "__main__":
    sys.exit(main())
