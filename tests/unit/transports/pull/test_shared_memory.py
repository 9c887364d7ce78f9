"""Memory and signals that ranks of one host share, between two ends in this process."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from ds_ring.comm.mesh import RingMesh
from ds_ring.comm.messages import Message, TokenRange
from ds_ring.errors import RingBufferError, RingMismatchError
from ds_ring.schedule.grid import Grid
from ds_ring.transports.pull.shared_memory import READY, HostShared, Pull
from ds_ring.transports.pull.signals import PullExchange, SharedBuffersByDevice, _key

CPU = torch.device("cpu")


def two_ends() -> tuple[HostShared, HostShared]:
    ends = HostShared(256, CPU, [1]), HostShared(256, CPU, [0])
    for rank, one in enumerate(ends):
        ipc_handles = json.loads(json.dumps(ends[1 - rank].ipc_handles))
        with mock.patch.object(dist, "get_rank", return_value=rank):
            one.open({1 - rank: ipc_handles}, mock.sentinel.group)
    return ends


def test_a_batch_before_the_last_one_was_taken_is_refused() -> None:
    first, second = two_ends()
    first.begin([1], {})
    into = torch.ones(4, dtype=torch.uint8)
    (take,) = second.begin([], {0: [Pull(0, into)]})
    with pytest.raises(RingBufferError, match="expected that rank 1 of the ring has taken the last batch"):
        first.begin([1], {})
    take.wait()
    assert into.tolist() == [0] * 4


def test_signals_end_with_the_rank_that_gives_them() -> None:
    first, second = two_ends()
    for one in (first, second):
        one.close_handles()
    del second, one
    with pytest.raises(RuntimeError, match="its signals have ended: the process is gone"):
        first._hear(READY, 1)


def test_a_signal_out_of_turn_is_refused() -> None:
    first, second = two_ends()
    second._put[READY, 0] = 4
    second._signal(READY, 0)
    with pytest.raises(RuntimeError, match=f"expected signal 1 of kind {READY} from it, got 5"):
        first._hear(READY, 1)


def test_a_message_that_does_not_lie_where_its_receiver_reads_is_refused() -> None:
    storage = torch.zeros(256, dtype=torch.uint8)
    mesh = RingMesh(Grid(2, 2), 0)
    exchange = PullExchange(mesh)
    tokens = TokenRange(0, np.array([[0, 4]]), slice(0, 1))
    message = Message(storage[64:128], 1, "Q", tokens=tokens)
    exchange._device = CPU
    mesh.owners[SharedBuffersByDevice][CPU] = SimpleNamespace(
        shared=SimpleNamespace(storage=storage.untyped_storage())
    )
    exchange._messages = {_key(0, 1, message): 64}
    assert exchange.route([message], []).places == ()
    exchange._messages = {_key(0, 1, message): 32}
    text = "expected it 32 bytes behind the start of the shared memory, got 64"
    with pytest.raises(RingMismatchError, match=re.escape(text)):
        exchange.route([message], [])
