"""Read the secret that the launcher hands to every rank of a job.

The one module of ds_ring that reads the environment, and only this variable: a script that calls
`ds_ring.initialize` is started by an engine (deepspeed, torchrun, mpirun) that passes on nothing else without
showing it to other users of the host: arguments stand in every process list, the DeepSpeed JSON in logs. What
the secret is for stands in `health/monitor/handshake.py`.
"""

from __future__ import annotations

import os

SECRET_VARIABLE = "DS_RING_SECRET"


def job_secret() -> str | None:
    """Return the job's secret; None where no launcher has set one."""
    return os.environ.get(SECRET_VARIABLE) or None
