"""Who is taken for dead before the monitor runs."""

from __future__ import annotations

import json
import subprocess
import time

import pytest
from torch.distributed import HashStore

from ds_ring.health.joining import Arrival, PeerLost, presence


def test_a_process_id_counts_on_its_host_and_in_its_namespace_alone() -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    mine, store = presence(), HashStore()
    here = mine._replace(pid=gone.pid)
    for name, other in {
        "host": here._replace(host="another"),
        "pids": here._replace(processes="other"),
    }.items():
        store.set(f"{name}/1", json.dumps(other))
        Arrival(store, name, 0, 2, time.monotonic() + 60, None).check()
    store.set("here/1", json.dumps(here))
    with pytest.raises(PeerLost, match="its process ended"):
        Arrival(store, "here", 0, 2, time.monotonic() + 60, None).check()
