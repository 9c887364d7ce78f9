"""Who is taken for dead before the monitor runs."""

from __future__ import annotations

import json
import subprocess
from unittest import mock

import pytest
from torch.distributed import HashStore

from ds_ring.errors import RingConfigError, RingPeerError
from ds_ring.health.joining import START, Arrival, PeerLost, leave_on_error, presence
from ds_ring.health.watch import Watch


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
        Arrival(store, name, 0, 2, START, None).check()
    store.set("here/1", json.dumps(here))
    with pytest.raises(PeerLost, match="its process ended"):
        Arrival(store, "here", 0, 2, START, None).check()


@pytest.mark.parametrize(
    ("error", "noticed", "failed", "left"),
    [
        (RingPeerError(0, None, 1, "it is gone"), True, 0, 0),
        (RingConfigError("a wrong key"), False, 0, 1),  # every rank raises it
        (ValueError("a bug"), False, 1, 1),
    ],
)
def test_only_a_failure_of_its_own_is_told_to_the_others_at_the_start(
    error: Exception, noticed: bool, failed: int, left: int
) -> None:
    watch = mock.Mock(spec=Watch, noticed=False)
    with pytest.raises(type(error)), leave_on_error(watch):
        raise error
    assert (watch.noticed, watch.failed.call_count, watch.leave.call_count) == (noticed, failed, left)
