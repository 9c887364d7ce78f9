"""Join the monitor as a rank does, wait as a rank that trains, and raise when another one has failed.

`ds_ring_launcher.run.rank` runs it, as it runs every script. No torch: the process must not have imported it.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import types
from pathlib import Path
from typing import Any, cast

from ds_ring.errors import RingPeerError
from ds_ring.health.joining import join
from ds_ring.limits import Limit
from simulated_cluster.figures import Figures, Of
from simulated_cluster.store import TorchStore

JOIN_SECONDS = 300.0
STEP_SECONDS = 0.5
PATIENCE_SECONDS = 0.25  # that a pass has to end after a fault (client.py, waiting.py)


class SimulatedBugError(Exception):
    """Stand for the error of a script."""


def main() -> None:
    """Be one rank until the tool orders "finish"."""
    words = [word for word in sys.argv[1:] if word != "--deepspeed"]
    told = dict(zip(words[::2], words[1::2], strict=True))  # argparse would be half of the processor time
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    attempt = Path(os.environ["DS_RING_RUN_FOLDER"]).name
    figures = Figures(Path(told["--figures"], f"{attempt}.figures"))
    report = types.ModuleType("report")  # where rank.py asks for the step
    report.step_under_way = lambda: 7  # type: ignore[attr-defined]
    sys.modules["ds_ring.measure.run_report"] = report
    store = TorchStore("127.0.0.1", int(told["--store-port"]), f"{told['--figures']}/{attempt}")
    secret, heartbeat_s = os.environ["DS_RING_SECRET"], float(told["--heartbeat-seconds"])
    detector = join(
        cast(Any, store), rank, ranks, heartbeat_s, None, secret, Limit(JOIN_SECONDS, "JOIN_SECONDS")
    )
    figures.note(rank, Of.HAS_TORCH, "torch" in sys.modules)
    figures.note(rank, Of.JOINED, time.time())
    wake = threading.Event()
    detector.subscribe(wake)
    is_culprit = rank == int(told["--culprit"])
    while figures.order != "finish":
        wake.wait(0.01 if is_culprit else STEP_SECONDS)
        if detector.fault is not None:
            figures.note(rank, Of.TOLD, time.time())
            figures.note(rank, Of.BLAMED, detector.fault.rank)
            detector.noticed = True
            time.sleep(PATIENCE_SECONDS)
            raise RingPeerError(rank, None, detector.fault.rank, detector.fault.cause)
        if figures.order == "raise" and is_culprit:
            figures.note(rank, Of.RAISED, time.time())
            raise SimulatedBugError("on purpose")


if __name__ == "__main__":
    main()
