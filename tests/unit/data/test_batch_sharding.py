"""Finding a batch's sharding again: by its tensors, by its length, or not at all."""

from __future__ import annotations

import pytest
import torch

from ds_ring.comm.mesh import RingMesh
from ds_ring.config.section import RingConfig
from ds_ring.data.batch_sharding import BatchSharding, RowsAttention
from ds_ring.data.layer_patterns import LayerPatterns
from ds_ring.data.ring_batch import REMEMBERED, RecentBatches
from ds_ring.errors import RingShapeError
from ds_ring.layers.latents.attention import LatentAttention
from ds_ring.masks.catalog import Causal, Full
from ds_ring.ops.context import make_ring_context
from ds_ring.ops.options import Options
from ds_ring.schedule.grid import Grid
from ds_ring.schedule.layout import make_layout

CONFIG = RingConfig(ring_size=2)
MESH = RingMesh(Grid(2, 2), 0)


def placed(tokens: int) -> tuple[torch.Tensor, BatchSharding]:
    layout = make_layout("zigzag", tokens=tokens, ring_size=2)
    return torch.zeros(1, layout.local_tokens), BatchSharding(CONFIG, layout, MESH, Causal())


def test_the_very_tensors_tell_batches_of_one_local_length_apart():
    book, batches = RecentBatches(), [placed(7), placed(8)]
    for local, sharding in batches:
        book.record({"input_ids": local}, sharding)
    for local, sharding in batches:
        assert book.select([local]) is sharding is book.current


def test_copies_are_found_by_length():
    book, (long, long_sharding), (short, short_sharding) = RecentBatches(), placed(64), placed(8)
    book.record({"input_ids": long}, long_sharding)
    book.record({"input_ids": short}, short_sharding)
    assert book.select([long.clone()]) is long_sharding


def test_a_copy_that_could_be_either_is_refused():
    book = RecentBatches()
    for local, sharding in (placed(7), placed(8)):
        book.record({"input_ids": local}, sharding)
    with pytest.raises(RingShapeError, match=r"may be of \[7, 8\] tokens"):
        book.select([local.clone()])


def test_a_batch_that_was_never_sharded_is_refused():
    book, (local, sharding) = RecentBatches(), placed(8)
    with pytest.raises(RingShapeError, match="none so far"):
        book.select([local])
    with pytest.raises(RingShapeError, match="got none so far"):
        _ = book.current
    book.record({"input_ids": local}, sharding)
    with pytest.raises(RingShapeError, match=r"\(\[4\]\), got \[8\]"):
        book.select([torch.zeros(1, 8)])


def test_only_the_latest_batches_are_remembered():
    book, (local, sharding) = RecentBatches(), placed(8)
    for _ in range(REMEMBERED + 1):
        book.record({"input_ids": local}, sharding)
    assert len(book._recent) == REMEMBERED


def test_ulysses_ranks_hold_a_part_of_a_shard():
    layout = make_layout("zigzag", tokens=32, ring_size=2, multiple_of=2)
    assert BatchSharding(CONFIG, layout, RingMesh(Grid(4, 2, 2), 0), Causal()).local_tokens == 8


def bias_of_positions(score, batch, head, q, k):
    return score - (q - k)


def test_what_is_kept_goes_by_all_that_it_depends_on():
    layout = make_layout("zigzag", tokens=8, ring_size=1)
    patterns = LayerPatterns(Causal(), {})
    config, mesh = RingConfig(ring_size=1), RingMesh.single()
    batch = BatchSharding(config, layout, mesh, patterns)
    latents = (None, None, None, LatentAttention)  # the module that attends
    asked = [(), (0.5,), (0.25,), (None, Full()), (None, None, bias_of_positions), latents]
    found = [batch.attention(*arguments) for arguments in asked]
    assert len(set(map(id, found))) == len(asked)
    assert [batch.attention(*arguments) for arguments in asked] == found

    other = make_layout("contiguous", tokens=8, ring_size=1)
    calls = [(Causal(), layout, Options()), (Full(), layout, Options()), (Causal(), other, Options())]
    calls += [(Causal(), layout, Options(scale=0.5)), (Causal(), "zigzag", Options())]
    contexts = [make_ring_context(pattern, where, mesh, options) for pattern, where, options in calls]
    assert len({context.handle for context in contexts}) == len(calls)
    assert [make_ring_context(pattern, where, mesh, options) for pattern, where, options in calls] == contexts


def test_rows_that_attend_apart_stay_where_they_are():
    """Three groups, in an order whose inverse is another one."""
    parts = [lambda q, k, v, sinks, n=n: 100 * n + q + k + v for n in range(3)]
    rows = RowsAttention(parts, ((2, 4), (0,), (1, 3)))
    x = torch.arange(5.0).reshape(5, 1, 1, 1)
    assert rows(x, x, x).flatten().tolist() == [100.0, 203.0, 6.0, 209.0, 12.0]
    with pytest.raises(RingShapeError, match="expected the batch's 5 samples"):
        rows(x[:4], x[:4], x[:4])
