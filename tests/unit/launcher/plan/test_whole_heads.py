"""A delta rule's states by a scan or by heads: bytes, depth, seconds and the break-even, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ds_ring import Causal
from ds_ring_launcher.plan.estimate import estimate
from ds_ring_launcher.plan.hardware import hardware_from
from ds_ring_launcher.plan.other_layers import Recurrence
from ds_ring_launcher.plan.training_setting import TrainingSetting
from ds_ring_launcher.plan.whole_heads import StatesAdvice, sentences, states_by_heads
from tests.unit.launcher.plan.test_cost import RATES
from tests.unit.launcher.plan.test_node_orders import setting

HEADS, DIM = 2, 64
STATE = HEADS * DIM * DIM
DELTA = Recurrence(
    "delta", 0, 0, 0, 0, STATE, STATE, True, HEADS, swapped=HEADS * (4 * DIM + 1), swapped_floats=HEADS
)
LINK, FLOPS = 1e9, 1e12


def planned(
    tokens: int, ring: int = 1, ulysses: int = 2, wait_s: float = 0.0, **more: object
) -> TrainingSetting:
    hardware = hardware_from({**RATES, "devices_per_node": 8, "hop_overhead_s": wait_s}, "test")
    found = setting(ring * ulysses, ulysses, tokens=tokens, hardware=hardware)
    kind = DELTA._replace(**more)
    return replace(found, other_layers=((kind, Causal(), 3),))


def advice(*args: int, **more: object) -> StatesAdvice:
    (found,) = states_by_heads(estimate(planned(*args, **more)))  # type: ignore[arg-type]
    return found


def test_one_shard_of_two_ulysses_ranks_by_hand() -> None:
    found, tokens = advice(1024), 512
    # The first half's state goes to the second in one round, and as the state before it: rank 0 sends both,
    # and rank 1 both gradients.
    message = STATE * 4
    columns = 6 * STATE * tokens / FLOPS  # of the transition; as many FLOPs as the states themselves
    assert found.scan.bytes_sent == 2 * message and found.scan.depth == 2
    assert found.scan.seconds == pytest.approx(2 * 2 * message / LINK + 3 * 2 * columns)
    # Half of q, k, v, beta, g and the outputs goes to the other rank; nothing is scanned.
    crosses = tokens * (HEADS * (4 * DIM + 1) + HEADS) * 4 // 2
    assert found.by_heads.bytes_sent == 2 * crosses and found.by_heads.depth == 2
    assert found.by_heads.seconds == pytest.approx(2 * crosses / LINK + 3 * columns)
    # 131 us of states are worth 2,064 bytes a token, less the columns: 68 tokens
    worth = 4 * message / ((2 * crosses / LINK - 3 * columns) / tokens * LINK)
    assert found.pays_below_tokens_per_rank == int(worth) == 68 and not found.takes_heads


@pytest.mark.parametrize(("ring", "ulysses"), [(1, 2), (2, 2), (4, 2)])
@pytest.mark.parametrize("wait_s", [0.0, 1e-4])
def test_the_faster_way_changes_at_the_break_even(ring: int, ulysses: int, wait_s: float) -> None:
    found = advice(4096, ring, ulysses, wait_s=wait_s)
    below = found.pays_below_tokens_per_rank
    assert below is not None
    if below == 0:
        assert not advice(16 * ring * ulysses, ring, ulysses, wait_s=wait_s).takes_heads
        return
    ranks = ring * ulysses
    for tokens, takes in ((below // 4 * 2, True), (2 * below, False)):
        one = advice(2 * (tokens // 2) * ranks, ring, ulysses, wait_s=wait_s)
        assert one.takes_heads == takes
        assert one.pays_below_tokens_per_rank == pytest.approx(below, abs=1)


def test_a_ring_between_nodes_scans_the_states_of_its_heads() -> None:
    found, one = advice(4096, 4, 2), advice(4096, 1, 2)
    # eight runs of two Ulysses ranks in four shards, and seven runs of four shards
    assert (found.scan.depth, found.by_heads.depth) == (4, 2 + 4) and one.by_heads.depth == 2
    swapped = 2 * 512 * 516 * 4 // 2
    assert found.by_heads.bytes_sent - swapped < found.scan.bytes_sent


def test_without_ulysses_ranks_the_most_that_heads_allow_are_compared() -> None:
    found = states_by_heads(estimate(planned(4096, 4, 1)))
    assert [one.ulysses_size for one in found] == [2]
    (text,) = sentences(estimate(planned(4096, 4, 1)))
    assert 'keep the scan, not "ulysses_size": 2 and engine.ring.states_by_heads()' in text
    assert states_by_heads(estimate(planned(4096, 4, 1, heads=3))) == ()
    assert states_by_heads(estimate(planned(4096, 1, 2, heads=3))) == ()
    assert states_by_heads(estimate(planned(4096, 1, 2, heads=0))) == ()
    (text,) = sentences(estimate(planned(64)))
    assert "delta: take engine.ring.states_by_heads()" in text and "faster below T/P = 68 (here 32)" in text
