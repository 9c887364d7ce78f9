"""`ds_ring.initialize` and `engine.ring` on real ranks: who sees which samples, and errors on every rank."""

from __future__ import annotations

import re
import types
from typing import Any

import pytest
import torch

from tests.dist.deepspeed_ranks import Size, build_batch, build_model, json_config, start_deepspeed, take_step

SIZE = Size(hidden=32, layers=1, tokens=21, samples=2)


class Numbered(torch.utils.data.Dataset):
    """Sample n consists of the token n, nine times."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.full((9,), index + 1)
        return {"input_ids": ids, "labels": ids}


def start(config: dict[str, Any] | None = None, implementation: str = "ds_ring", **arguments: Any) -> Any:
    """`ds_ring.initialize` with a tiny model and SGD."""
    start_deepspeed()
    import ds_ring
    import ds_ring.models.attention

    model = arguments.pop("model") if "model" in arguments else build_model(SIZE, implementation)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1) if model is not None else None
    if "args" not in arguments:
        arguments["config"] = json_config(2, 2, 1) if config is None else config
    return ds_ring.initialize(model=model, optimizer=sgd, **arguments)


def samples_seen(rank: int, world_size: int, ring_size: int) -> list[list[int]]:
    """The samples of each of two epochs, in order; each batch also goes through the model."""
    engine, _, loader, _ = start(json_config(ring_size, 1, 0), training_data=Numbered(8))
    epochs = []
    for epoch in range(2):
        loader.set_epoch(epoch)
        seen = []
        for batch in loader:
            assert engine(**batch).loss.isfinite()
            seen.append(int(batch["input_ids"].max()))
        assert len(seen) == len(loader)
        epochs.append(seen)
    return epochs


@pytest.mark.parametrize(("world", "ring"), [(2, 2), (4, 2), (4, 4)])
@pytest.mark.day("4-2")
def test_a_ring_shares_samples_and_replicas_do_not(rank_pool, world, ring):
    by_rank = rank_pool(world).run(samples_seen, ring, timeout_s=120)
    replicas = [by_rank[rank] for rank in range(0, world, ring)]
    for rank, epochs in enumerate(by_rank):
        assert epochs == replicas[rank // ring]
    for epoch in range(2):
        everything = [sample for replica in replicas for sample in replica[epoch]]
        assert sorted(everything) == list(range(1, 9))
    assert by_rank[0][0] != by_rank[0][1], "the second epoch has the order of the first"


def evaluate_on_ring(rank: int, world_size: int) -> dict[str, Any]:
    """Logits, gathered; the loss by both roads; what the arguments of a command line give."""
    args = types.SimpleNamespace(deepspeed_config=json_config(2, 2, 3), local_rank=rank)
    engine, _, _, _ = start(args=args)
    assert args.deepspeed_config is not None, "the caller's arguments were changed"
    batch = engine.ring.shard_batch(build_batch(SIZE))
    with torch.no_grad():
        output = engine(**batch)
        loss = engine.ring.loss(output.logits, batch)
    return {
        "logits": engine.ring.gather(output.logits),
        "losses": [float(engine.ring.mean_loss(output.loss)), float(loss.mean_loss)],
        "valid_tokens": float(loss.valid_tokens),
        "parts": [float(output.loss), float(loss.backward_loss)],
    }


def test_logits_and_loss_of_the_whole_batch(rank_pool):
    batch = build_batch(SIZE)
    expected = build_model(SIZE, "sdpa")(**batch)
    real = batch["attention_mask"].bool()
    for got in rank_pool(2).run(evaluate_on_ring):
        assert torch.allclose(got["logits"][real], expected.logits[real], atol=1e-5)
        assert got["losses"] == pytest.approx([expected.loss.item()] * 2, rel=1e-5)
        assert got["valid_tokens"] == (batch["labels"][:, 1:] != -100).sum()
        assert got["parts"][0] == pytest.approx(got["parts"][1])


def no_labels_at_all(rank: int, world_size: int) -> tuple[float, float]:
    """A batch in which nothing is to be predicted, and one in which all labels lie on one rank."""
    engine, _, _, _ = start()
    batch = build_batch(SIZE)
    labels = torch.full_like(batch["labels"], -100)
    losses = []
    for last in (None, 1):
        labels[:, 1] = -100 if last is None else last
        losses.append(take_step(engine, batch | {"labels": labels}))
    assert all(bool(p.isfinite().all()) for p in engine.module.parameters())
    return losses[0], losses[1]


def test_ranks_without_labels(rank_pool):
    for empty, entry in rank_pool(2).run(no_labels_at_all):
        assert empty == 0.0
        assert entry > 1.0


def two_lengths_in_flight(rank: int, world_size: int) -> bool:
    """Batches of 20 and 19 tokens both have 10 local ones; each must find its own layout."""
    engine, _, _, _ = start()
    whole = [{"input_ids": build_batch(SIZE)["input_ids"][:, :tokens]} for tokens in (20, 19)]
    with torch.no_grad():
        alone = [engine(**engine.ring.shard_batch(batch)).logits for batch in whole]
        sharded = [engine.ring.shard_batch(batch) for batch in whole]
        again = [engine(**batch).logits for batch in sharded]
    return all(torch.equal(entry, peer) for entry, peer in zip(again, alone, strict=True))


def test_batches_drawn_ahead_keep_their_layouts(rank_pool):
    assert rank_pool(2).run(two_lengths_in_flight) == [True, True]


def a_batch_that_is_wrong_on_one_rank(rank: int, world_size: int, what: str) -> None:
    from ds_ring.comm.mesh import RingMesh
    from tests.sessions import session_of

    session = session_of(RingMesh.from_world(2), float(world_size))
    batch = build_batch(SIZE)
    if rank == 1:
        ids = batch["input_ids"]
        batch = {
            "other tokens": lambda: batch | {"input_ids": ids + 1},
            "other labels": lambda: batch | {"labels": batch["labels"].clone().fill_(3)},
            "fewer tokens": lambda: {key: value[:, :-1] for key, value in batch.items()},
            "fewer samples": lambda: {key: value[:1] for key, value in batch.items()},
            "no labels": lambda: {key: value for key, value in batch.items() if key != "labels"},
            "left padding": lambda: batch | {"attention_mask": batch["attention_mask"].flip(1)},
        }[what]()  # fmt: skip
        if what == "other labels":
            batch["labels"][batch["attention_mask"] == 0] = -100
    session.shard_batch(batch)


MISMATCHES = {
    "other tokens": r"input tokens \(checksum\).*on rank 0 and .*on rank 1; use engine.ring.loader",
    "other labels": r"labels \(checksum\)",
    "fewer tokens": "tokens in a sample: .*got 21 on rank 0 and 20 on rank 1",
    "fewer samples": "samples in the batch: .*got 2 on rank 0 and 1 on rank 1",
    "no labels": "names of tensors",
}


@pytest.mark.parametrize("what", MISMATCHES)
def test_ranks_with_different_batches_all_stop(rank_pool, what):
    for outcome in rank_pool(2).collect(a_batch_that_is_wrong_on_one_rank, what):
        assert outcome.error_type == "RingMismatchError", outcome.report
        assert re.search(MISMATCHES[what], outcome.message), outcome.message


def test_a_batch_refused_on_one_rank_stops_all(rank_pool):
    first, second = rank_pool(2).collect(a_batch_that_is_wrong_on_one_rank, "left padding")
    assert (first.error_type, second.error_type) == ("RingMismatchError", "RingPatternError")
    assert "rank 1 refused its batch" in first.message
    assert "padding_side" in second.message
