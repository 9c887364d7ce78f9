"""Which samples a replica takes: torch's own order, batches of like length, turns, positions in an epoch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler

from ds_ring.data.loader import BatchTurns, DrawnBatches, SampleOrder, position_in
from ds_ring.errors import RingConfigError


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(("samples", "batch", "replicas"), [(23, 2, 3), (8, 1, 1), (2, 1, 5), (24, 4, 3)])
def test_the_order_is_that_of_a_distributed_sampler(samples, batch, replicas, shuffle, drop_last):
    options = {"shuffle": shuffle, "seed": 5, "drop_last": drop_last}
    for rank in range(replicas):
        torchs = DistributedSampler(range(samples), replicas, rank, **options)
        ours = SampleOrder(samples, batch, (rank, replicas), **options)
        for epoch in range(2):
            torchs.set_epoch(epoch)
            ours.epoch, ours.first = epoch, 0
            expected = list(BatchSampler(torchs, batch, drop_last))
            assert list(ours) == expected
            assert len(ours) == len(expected)
            ours.first = 2
            assert list(ours) == expected[2:]


def test_batches_of_all_replicas_have_like_lengths():
    lengths = np.random.default_rng(0).integers(1, 1000, 801)
    orders = [
        SampleOrder(801, 4, (rank, 2), shuffle=True, seed=0, drop_last=False, lengths=lengths)
        for rank in range(2)
    ]
    epochs = []
    for epoch in range(2):
        for order in orders:
            order.epoch = epoch
        rounds = [[*first, *second] for first, second in zip(*orders, strict=True)]
        assert {index for both in rounds for index in both} == set(range(801))
        padding = sum(lengths[both].max() * len(both) - lengths[both].sum() for both in rounds)
        assert padding < 0.1 * lengths.sum()  # 0.76 without grouping
        epochs.append(rounds)
    assert epochs[0] != epochs[1]
    firsts = [lengths[both].mean() for both in epochs[0]]
    assert np.abs(np.diff(firsts)).mean() > 100, "batches come in the order of their lengths"


@pytest.mark.parametrize("batches", [*range(5), 7])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_turns_divide_all_batches_evenly(batches, size):
    taken = [list(DrawnBatches(range(batches), (rank, size))) for rank in range(size)]
    assert {len(one) for one in taken} == {-(-batches // size)}
    in_turns = [batch for round_of_all in zip(*taken, strict=True) for batch in round_of_all]
    assert in_turns == np.resize(range(batches), len(in_turns)).tolist(), "a short last round begins anew"


def test_a_generator_of_the_callers_is_put_back_to_where_its_order_was_drawn():
    def order() -> BatchTurns:
        generator = torch.Generator().manual_seed(9)
        return BatchTurns(BatchSampler(RandomSampler(range(9), generator=generator), 2, True), (0, 1))

    whole, resumed = order(), order()
    first = list(whole)
    assert first == list(
        BatchSampler(RandomSampler(range(9), generator=torch.Generator().manual_seed(9)), 2, True)
    )
    second, state = list(whole), whole.state(1)
    assert second != first
    resumed.restore(state)
    resumed.first = 1
    assert list(resumed) == second[1:]
    resumed.first = 0
    assert list(resumed) == list(whole), "the epoch after it"


def test_positions_count_samples_of_all_replicas():
    def order(replicas: int) -> SampleOrder:
        return SampleOrder(24, 1, (0, replicas), shuffle=False, seed=0, drop_last=False)

    assert position_in({"epoch": 2, "samples": 24}, order(4)) == (2, 6)
    assert position_in({"epoch": 2, "samples": 24}, order(8)) == (2, 3)
    with pytest.raises(RingConfigError, match="multiple of 16 samples, got 24"):
        position_in({"epoch": 2, "samples": 24}, order(16))
    for wrong in ({"epoch": 1, "batches": 3}, {}, {"epoch": 1.0, "samples": 8}, {"epoch": 0, "samples": -8}):
        with pytest.raises(RingConfigError, match="expected whole numbers "):
            position_in(wrong, order(4))
