"""Start a thousand ranks on this machine and see what launcher, monitor and relaunch make of a fault.

Real: `ds-ring launch` with its run folder, relaunch, back-off, smaller ring, guardian; the question to
every host and the answer there; the program around each script (`launcher/run/rank.py`: logs, faults,
exits); joining, the monitor process, heartbeats and verdicts over TCP; torch's store. Pretended: hosts
(addresses of loopback, on one machine), ssh, mpirun, the training script: it joins, waits, and never
imports torch. Checkpoints are none. `tools/simulated_cluster/` has the stand-ins.

Exit code 1 if a bound is missed (join 20 s, a verdict 1 s, relaunch decided 5 s; none with --busy), a wrong
rank is blamed, a rank imported torch or a process is left.

With --rounds the last table has the distribution of all rounds: when ranks knew, when relaunch was decided,
and for how many rank-hours nothing was wrong and nothing was reported.

Example:
    python tools/simulate_cluster.py --ranks 1024 --hosts 128
    python tools/simulate_cluster.py --ranks 16 --faults kill host
    python tools/simulate_cluster.py --faults kill stop --rounds 3 --busy 4 --quiet-seconds 30
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
from common import parser_of
from rich.table import Table
from simulated_cluster.figures import Of
from simulated_cluster.job import (
    FAULTS,
    ClusterSetting,
    FalseAlarmError,
    SimulationError,
    Story,
    helper,
    play,
)  # fmt: skip

from ds_ring_launcher.tables import print_table

JOIN_S, VERDICT_S, DECIDED_S = 20.0, 1.0, 5.0


def main(arguments: list[str] | None = None) -> int:
    """Print a table per fault; return 1 if anything is not as promised."""
    parser = parser_of(
        __doc__, ranks=1024, heartbeat_seconds=(10.0, "heartbeat timeout"),
        deadline_seconds=(300.0, "for each fault"), rounds=(1, "of each fault"),
        quiet_seconds=(0.5, "of work before a fault, and after the relaunch"),
        busy=(0, "processes that only compute, beside the job"),
    )  # fmt: skip
    parser.add_argument("--hosts", type=int, help="all with as many ranks; default: 8 ranks each")
    what = "kill (a rank), stop (a rank), bug (in a rank), host (all of its ranks)"
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=FAULTS, metavar="FAULT", help=what)
    parser.add_argument("--keep", type=Path, help="a new folder for runs and logs; default: none is kept")
    options = parser.parse_args(arguments)
    hosts = options.hosts or max(options.ranks // 8, 1)
    if hosts < 2 or options.ranks % hosts:
        parser.error(f"--hosts: expected two or more that divide {options.ranks} ranks, got {hosts}")
    setting = ClusterSetting(
        options.ranks, hosts, options.heartbeat_seconds, options.deadline_seconds, options.quiet_seconds,
        options.busy,
    )  # fmt: skip
    bad, found = False, Rounds(setting)
    with tempfile.TemporaryDirectory(prefix="ds-ring-") as name, helper("store") as port:
        for number in range(options.rounds):
            for fault in options.faults:
                folder = (options.keep or Path(name)) / f"{fault}-{number}"
                folder.mkdir(parents=True)
                try:
                    story = play(folder, setting, fault, int(port))
                except SimulationError as error:
                    print(f"{fault}: {type(error).__name__}: {error}"[:600], file=sys.stderr)
                    found.false_alarms += isinstance(error, FalseAlarmError)
                    bad = True
                    continue
                found.add(fault, story)
                bad |= _print(story, setting, fault)
    if options.rounds > 1:
        found.print()
    return int(bad)


class Rounds:
    """Gather the times of all rounds of one setting."""

    def __init__(self, setting: ClusterSetting) -> None:
        self.setting, self.false_alarms, self.quiet_s = setting, 0, 0.0
        self._known: dict[str, list[float]] = {}  # by fault: of each survivor
        self._decided: dict[str, list[float]] = {}

    def add(self, fault: str, story: Story) -> None:
        """Take the times of a job."""
        self.quiet_s += story.quiet_s
        told = story.attempts[0].known(Of.TOLD)
        survivors = [at - story.struck for rank, at in told.items() if rank not in story.culprits]
        self._known.setdefault(fault, []).extend(survivors)
        self._decided.setdefault(fault, []).append(story.event("end", 1)["at"] - story.struck)

    def print(self) -> None:
        """Print the quartiles, and what was quiet."""
        table = Table(title=f"all rounds, {self.setting.busy} busy processes", title_justify="left")
        for name in ("seconds from the fault", "of", "least", "1/4", "1/2", "3/4", "most"):
            table.add_column(name, justify="left" if name == "seconds from the fault" else "right")
        for fault, known in self._known.items():
            for what, times in (
                (f"{fault}: a rank knows", known),
                (f"{fault}: relaunch", self._decided[fault]),
            ):
                quarters = np.quantile(times, [0, 0.25, 0.5, 0.75, 1]).tolist() if times else []
                table.add_row(what, f"{len(times):,}", *(f"{one:.2f}" for one in quarters))
        print_table(table)
        hours = self.quiet_s * self.setting.ranks / 3600
        print(f"{hours:.1f} rank-hours without a fault, false alarms: {self.false_alarms}")


def _print(story: Story, setting: ClusterSetting, fault: str) -> bool:
    """Print what became of one job; return whether something is not as promised."""
    table = Table(title=f"{fault}: {setting.ranks} ranks on {setting.hosts} hosts", title_justify="left")
    for name in ("from the fault", "seconds", "bound"):
        table.add_column(name, justify="left" if name == "from the fault" else "right")
    wrong = _wrong(story, setting, fault)
    for what, seconds, bound in _moments(story, setting, fault):
        bound = None if setting.busy else bound
        late = bound is not None and seconds >= bound
        wrong += [f"{what}: {seconds:.2f} s, expected less than {bound:g}"] if late else []
        table.add_row(what, f"{seconds:.2f}", "" if bound is None else f"{bound:g}")
    print_table(table)
    first, again = story.event("fault", 1), story.event("start", 2)
    print(f"named: {first.get('what')}"[:150])
    print(
        f"next: {again.get('world_size')} ranks, {again.get('sequence_parallel_size')} share a sequence,"
        f" missing {again.get('missing')}; the launcher's status {story.status}"
    )
    for one in wrong:
        print(f"WRONG: {one}")
    return bool(wrong)


def _moments(story: Story, setting: ClusterSetting, fault: str) -> list[tuple[str, float, float | None]]:
    """Return how long things took, in seconds, and how long they may; None where nothing is promised."""
    first = story.attempts[0]
    forked, told = min(first.all(Of.FORKED)), first.known(Of.TOLD).values()
    joined = max(first.all(Of.JOINED)) - forked
    # A stopped rank is found by its silence, which takes as long as the job allows it.
    silence = setting.heartbeat_s if fault == "stop" else 0.0
    since = story.struck + silence
    chosen_s = DECIDED_S if fault == "host" else None
    moments: list[tuple[str, float, float | None]] = [
        (
            "(before it) all hosts asked, from the launcher's start",
            story.event("start", 1)["at"] - story.started,
            None,
        ),
        ("(before it) all have joined, from the first fork", joined, JOIN_S),
    ]
    if silence:
        moments.append((f"(after it) silence of {silence:g} s is over; from there", silence, None))
    moments += [
        ("the first rank knows the verdict", min(told, default=since) - since, None),
        ("the last rank knows the verdict", max(told, default=since) - since, VERDICT_S),
        ("relaunch is decided", story.event("end", 1)["at"] - since, DECIDED_S),
        ("hosts are asked, the ring is chosen", story.event("start", 2)["at"] - since, chosen_s),
    ]
    if len(story.attempts) > 1:
        moments.append(("all have joined again", max(story.attempts[1].all(Of.JOINED)) - since, None))
    return moments


def _wrong(story: Story, setting: ClusterSetting, fault: str) -> list[str]:
    """Return the broken promises other than times."""
    first, wrong = story.attempts[0], list[str]()
    others = set(range(setting.ranks)) - set(story.culprits)
    told, blamed = first.known(Of.TOLD), set(first.known(Of.BLAMED).values())
    if not others <= told.keys():
        wrong.append(f"expected {len(others)} ranks to know the verdict, got {len(others & told.keys())}")
    if len(blamed) != 1 or not blamed <= set(story.culprits):
        wrong.append(f"expected all to blame one of ranks {story.culprits}, got {sorted(blamed)}")
    named, host = story.event("fault", 1), setting.names[story.culprits[0] // setting.slots]
    if named.get("rank") not in story.culprits or named.get("host") != host:
        wrong.append(f"expected the launcher to name {story.culprits} on {host}, got {named}")
    if any(sum(attempt.all(Of.HAS_TORCH)) for attempt in story.attempts):
        wrong.append("a rank has imported torch")
    ends = [story.event("end", attempt).get("next") for attempt in (1, 2)]
    expected = (["again", "stop"], 1 if fault == "bug" else 0)
    if (ends, story.status) != expected:
        wrong.append(f"expected decisions and status {expected}, got {ends} and {story.status}")
    if story.left:
        wrong.append(f"processes are left: {story.left[:5]}")
    return wrong


if __name__ == "__main__":
    sys.exit(main())
