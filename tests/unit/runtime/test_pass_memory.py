"""Memory of a pass: its buffers lie apart while both are in use, in no more memory than one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ds_ring.masks.pattern import Pattern
from ds_ring.runtime.buffers import Buffers, kind_of
from ds_ring.runtime.pass_memory import PassMemory, Use, place
from ds_ring.runtime.prepared import PreparedPass
from ds_ring.runtime.views import Pair
from tests.cases import PATTERNS
from tools.bench_host import hops_of

LIKE = Pair(torch.zeros(1, 1, 8, 16), torch.zeros(1, 1, 8, 16))


def kind(slots: int, dtype: torch.dtype = torch.float32) -> Any:
    return kind_of(LIKE, slots, dtype)


@given(
    st.lists(
        st.tuples(st.integers(0, 30), st.integers(1, 12), st.sampled_from([1, 2, 4, 8]), st.booleans()),
        min_size=1,
        max_size=40,
    )
)
def test_buffers_in_use_at_once_lie_apart(drawn: list[tuple[int, int, int, bool]]) -> None:
    """Any lifetimes: where there are places, they are disjoint, and the block as large as what was in use."""
    events = sorted(
        (time, end_first, number)
        for number, (begin, length, _, _) in enumerate(drawn)
        for time, end_first in ((begin, 1), (begin + length, 0))
    )
    at = {(number, begins): clock for clock, (_, begins, number) in enumerate(events)}
    uses = [
        Use(0, number, kind(slots, torch.bfloat16 if low else torch.float32), at[number, 1], at[number, 0])
        for number, (_, _, slots, low) in enumerate(drawn)
    ]
    most = max(sum(u.kind.nbytes for u in uses if u.begin <= now < u.end) for now in range(len(events)))
    places = place(uses)
    if places is None:
        assert len(uses) > 2, "two buffers always fit"
        return
    assert places.nbytes == most
    lies = [places.parts[places.chunks[0][use.buffer]] for use in uses]
    for one, (a, a_at) in zip(uses, lies, strict=True):
        assert one.kind == a and a_at + a.nbytes <= places.nbytes
        for other, (b, b_at) in zip(uses, lies, strict=True):
            if one is not other and one.begin < other.end and other.begin < one.end:
                assert a_at + a.nbytes <= b_at or b_at + b.nbytes <= a_at


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("name", ["causal", "full"])
@pytest.mark.parametrize("ring_size", [2, 3, 8])
def test_from_its_second_pass_on_a_shape_takes_one_block_of_the_same_size(
    name: str, layout: str, ring_size: int
) -> None:
    pattern: Pattern = PATTERNS[name](16 * ring_size)
    with hops_of(pattern, layout, ring_size) as hops:
        pool = hops.made.buffers
        hops.backward()
        most = pool._most_bytes
        for _ in range(3):
            hops.forward()
            hops.backward()
        (blocks,) = pool._free.values()
        assert [block.nbytes for block in blocks] == [most], (
            "forward passes lie in the block of backward ones"
        )


def test_a_buffer_without_a_place_is_taken_beside_the_block() -> None:
    """Copies for messages are made where the caller's tensors have gaps: not in every pass of a shape."""
    pool, prepared = Buffers(), PreparedPass()
    for buffers in ((2,), (2, 3), (2, 3)):
        memory: PassMemory = prepared.memory(pool)
        known = memory.known(0)
        taken = [one for one in buffers if one not in known]
        pairs = [*known.values(), *(memory.take(0, one, kind(8), LIKE) for one in taken)]
        addresses = {x.data_ptr() for pair in pairs for x in (pair.first, pair.second)}
        assert len(addresses) == 2 * len(buffers)
        for one in taken:
            memory.give(0, one)
        prepared.end(memory)
    assert known.keys() == {2}


def test_what_was_never_given_back_shares_its_place_with_none() -> None:
    kept, other = Use(0, 2, kind(8), 0), Use(0, 3, kind(8), 1, 2)
    places = place([kept, other])
    assert places is not None and places.nbytes == 2 * kind(8).nbytes
