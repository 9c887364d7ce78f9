"""Be `ds-ring launch` with one change: in place of the program mpirun, `engine.py` gets its command line."""

from __future__ import annotations

import sys
from dataclasses import replace

from ds_ring_launcher import cli
from ds_ring_launcher.engines.engines import ENGINES
from ds_ring_launcher.engines.mpirun import Mpirun
from ds_ring_launcher.run.job import Invocation, Job


class SimulatedMpirun(Mpirun):  # type: ignore[misc]
    """Call engine.py with mpirun's command line."""

    def invocation(self, job: Job) -> Invocation:
        """Return mpirun's invocation with another program."""
        real = super().invocation(job)
        program = [sys.executable, "-m", "simulated_cluster.engine"]
        return replace(real, argv=[*program, *real.argv[1:]], programs={})


if __name__ == "__main__":
    ENGINES["mpirun"] = SimulatedMpirun()
    sys.exit(cli.main(["launch", sys.argv[1]]))
