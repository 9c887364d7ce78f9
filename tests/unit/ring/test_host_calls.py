"""What the host does once for all passes of a shape: routes are looked up, buffers are taken from a pool."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from benchmarks.hop_stand_ins import Hops, prepare_hops
from torch import Tensor

from ds_ring.comm.exchange import Exchange


@pytest.fixture(scope="module")
def hops() -> Iterator[Hops]:
    with prepare_hops() as hops:
        yield hops


def test_a_batch_is_checked_and_looked_up_at_the_first_pass_of_its_shape(hops: Hops) -> None:
    longer = tuple(torch.cat([x, x]) for x in hops.operands[:3])  # two samples: other sizes
    hops.forward()
    with mock.patch.object(Exchange, "route", autospec=True, side_effect=Exchange.route) as looked_up:
        hops.forward()
        assert not looked_up.called
        hops.ring_pass.forward(*longer)
        first = looked_up.call_count
        assert first > 4
        hops.ring_pass.forward(*longer)
        assert looked_up.call_count == first


def test_passes_of_two_shapes_in_turn_share_a_pool_and_hold_no_more(hops: Hops) -> None:
    """The pool keeps what was in use at once, whichever shape comes next."""
    pool, operands = hops.ring_pass.buffers, hops.operands[:3]
    double: tuple[Tensor, ...] = tuple(torch.cat([x, x]) for x in operands)
    hops.ring_pass.forward(*double)
    held = pool.held_bytes
    for _ in range(3):
        for given in (operands, double):
            hops.ring_pass.forward(*given)
            assert pool.held_bytes <= held and pool.held_bytes == pool.free_bytes
