"""Loaders on real ranks: an epoch goes on where it was, whoever made the loader, with and without workers."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

import ds_ring
from ds_ring.data.packing import PackedRows
from ds_ring.data.session import RingSession
from ds_ring.ops.context import ContextCache
from ds_ring.schedule import choose, layout, lowering, plan
from tests.dist.harness import Failure, catch_failure, catch_refusal, run_ranks_collect
from tests.sessions import session_of

SAMPLES, TOKENS = 10, 9


class Numbered(Dataset[dict[str, Tensor]]):
    """Sample n consists of the token n + 1; says which were read."""

    def __init__(self, offset: int = 0) -> None:
        self.offset, self.read = offset, list[int]()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.read.append(index)
        ids = torch.full((TOKENS,), index + 1 + self.offset)
        return {"input_ids": ids, "labels": ids}


class Stream(IterableDataset[dict[str, Tensor]]):
    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return (Numbered()[index] for index in range(SAMPLES))


def forking_session(ring_size: int, **section: Any) -> RingSession:
    # A rank of the harness has workers as a script has: by a plain fork.
    multiprocessing.current_process()._config["daemon"] = False
    multiprocessing.set_start_method("fork", force=True)
    return session_of(ds_ring.RingMesh.from_world(ring_size=ring_size), **section)


def loader_of(session: RingSession, kind: str) -> Any:
    """A new loader, as a new process would make it; batches of two samples for each replica."""
    if kind.startswith("own"):
        return session.loader(Numbered(), 2, shuffle=True, seed=4, num_workers=2 * kind.endswith("workers"))
    if kind == "stream":
        return session.wrap(DataLoader(Stream(), 2), split=True)
    seed_ranks(session, 0)
    mesh, options = session.run_mesh, {"batch_size": 2, "num_workers": 2 * kind.endswith("workers")}
    if kind == "distributed":
        sampler = DistributedSampler(Numbered(), mesh.data_size, mesh.data_rank)
        return session.wrap(DataLoader(Numbered(), sampler=sampler, **options))
    return session.wrap(DataLoader(Numbered(), shuffle=True, **options))


def seed_ranks(session: RingSession, epoch: int) -> None:
    """Seed torch in each epoch, on each rank otherwise; rank 0's seed is the epoch."""
    torch.manual_seed(epoch + 10 * session.run_mesh.sequence_rank + 100 * session.run_mesh.data_rank)


def numbers(batches: Any) -> list[list[int]]:
    """The samples of each batch, from this rank's tokens."""
    return [batch["input_ids"].amax(dim=1).tolist() for batch in batches]


def resumed_in_mid_epoch(
    rank: int, world_size: int, ring_size: int, kinds: list[str]
) -> dict[str, list[list[list[int]]]]:
    """Two epochs at once; then three batches, and all that is left by a loader that gets their state."""
    session = forking_session(ring_size)
    return {kind: _two_epochs(session, kind) for kind in kinds}


def _two_epochs(session: RingSession, kind: str) -> list[list[list[int]]]:
    whole, part, resumed = (loader_of(session, kind) for _ in range(3))
    epochs = []
    for epoch in range(2):
        seed_ranks(session, epoch)
        epochs.append(numbers(whole))
    assert kind == "stream" or [len(epoch) for epoch in epochs] == [len(whole)] * 2
    part.set_epoch(1)
    seed_ranks(session, 1)
    begun = iter(part)
    assert numbers(islice(begun, 3)) == epochs[1][:3]
    resumed.load_state_dict(part.state_dict())
    resumed.set_epoch(1)  # as a loop over epochs does
    seed_ranks(session, 2)  # what it is now does not count
    assert numbers(resumed) == epochs[1][3:]
    if kind in ("own", "wrapped"):  # read by this process
        assert sorted(resumed.dataset.read) == sorted(n - 1 for batch in epochs[1][3:] for n in batch)
    assert resumed.epoch == 2
    assert resumed.state_dict()["epoch"] == 2
    return epochs


KINDS = ["own", "own with workers", "wrapped", "stream", "distributed"]


@pytest.mark.parametrize(("world", "kinds"), [(2, KINDS), (4, KINDS[::2])])
@pytest.mark.day("4-kinds1")
def test_an_epoch_goes_on_where_it_was(rank_pool, world, kinds):
    by_rank = rank_pool(world).run(resumed_in_mid_epoch, 2, kinds, timeout_s=240)
    for kind in kinds:
        replicas = [result[kind] for result in by_rank[::2]]
        assert [result[kind] for result in by_rank] == [item for item in replicas for _ in range(2)]
        for epoch in range(2):
            seen = [number for replica in replicas for batch in replica[epoch] for number in batch]
            assert set(seen) == set(range(1, SAMPLES + 1))
            assert len(seen) <= SAMPLES + 2 * (len(replicas) - 1)
        assert kind == "stream" or replicas[0][0] != replicas[0][1]
    assert world > 2 or by_rank[0]["own"] == by_rank[0]["own with workers"]


def orders_of_other_seeds(rank: int, world_size: int, seeds: list[int]) -> tuple[Any, ...]:
    """The samples of two epochs by torch's generator, seeded otherwise on each rank; what it gives then."""
    session, loader = forking_session(2), DataLoader(Numbered(), 2, shuffle=True)
    torch.manual_seed(seeds[rank])
    epochs = [numbers(session.wrap(loader, split=False)) for _ in range(2)]
    return epochs, torch.rand(3).tolist()


@pytest.mark.parametrize("seeds", [[5, 5], [5, 6]])
def test_ranks_of_other_seeds_have_the_order_of_rank_0_in_one_process(rank_pool, seeds):
    """(One fixed order was every run's, whatever the seed.)"""
    (epochs, drawn), (seconds, drawn_there) = rank_pool(2).run(orders_of_other_seeds, seeds)
    torch.manual_seed(5)
    loader = DataLoader(Numbered(), 2, shuffle=True)
    assert epochs == seconds == [numbers(loader) for _ in range(2)]
    assert drawn == torch.rand(3).tolist(), "as in one process"
    torch.manual_seed(seeds[1])
    assert drawn_there == (drawn if seeds[1] == 5 else torch.rand(3).tolist()), "a rank's own"


def resumed_with_other_replicas(rank: int, world_size: int, state: Any) -> tuple[list[list[int]], Any]:
    """A ring over all ranks with four samples, or rings of two with two each; the state after one batch."""
    session = forking_session(4 if state is None else 2)
    loader = session.loader(Numbered(), 4 if state is None else 2, shuffle=True)
    if state is None:
        first = iter(loader)
        next(first)
        return [loader.state_dict(), numbers(islice(first, 1))][::-1]
    loader.load_state_dict(state)
    return numbers(islice(loader, 1)), None


def resumed_from_another_checkpoint(rank: int, world_size: int, kind: str, wrong: bool) -> list[str]:
    """Rank 1, then all ranks of the second replica, have another state; with `wrong` theirs is none at all."""
    session, said = forking_session(2), []
    for differs in (rank == 1, rank >= 2, False):
        loader = loader_of(session, kind)
        state = loader.state_dict() | {"epoch": "x" if wrong and differs else int(differs)}
        said.append(catch_refusal(loader.load_state_dict, state))
    return said


@pytest.mark.parametrize("kind", ["own", "distributed"])
def test_ranks_that_resume_at_different_places_are_refused(rank_pool, kind):
    """(Each went on at its own; replicas read the same samples twice, and others never.)"""
    for by_rank in rank_pool(4).run(resumed_from_another_checkpoint, kind, False):
        assert by_rank[0].startswith("RingMismatchError: loader state: expected the same") or kind != "own"
        assert "on rank 0" in by_rank[1] if kind == "own" else by_rank[1] == ""  # replicas' own loaders
        assert by_rank[2] == ""
    for by_rank in rank_pool(4).run(resumed_from_another_checkpoint, kind, True):
        assert all(said.startswith("RingConfigError: ") and "loader state" in said for said in by_rank[:2])
        assert by_rank[2] == ""


def test_other_replicas_go_on_with_the_same_global_batches(rank_pool):
    expected, state = rank_pool(4).run(resumed_with_other_replicas, None)[0]
    by_rank = rank_pool(4).run(resumed_with_other_replicas, state)
    for batch, whole in enumerate(expected):
        assert sorted(by_rank[0][0][batch] + by_rank[2][0][batch]) == sorted(whole)


def refused(rank: int, world_size: int, cases: list[str]) -> list[str]:
    session = forking_session(2)
    loaders = {
        "other order": lambda: DataLoader(Numbered(offset=rank), 2),
        "other length": lambda: [{"input_ids": torch.ones(1, 8, dtype=torch.int64)}] * (3 + rank),
        "world sampler": lambda: DataLoader(Numbered(), 2, sampler=DistributedSampler(Numbered(), 4, rank)),
        "split twice": lambda: DataLoader(
            Numbered(), 2, sampler=DistributedSampler(Numbered(), 2, rank // 2)
        ),
        "iterable": lambda: DataLoader(Stream(), 2),
    }
    splits = {"split twice": True}
    return [
        catch_refusal(lambda what=what: list(session.wrap(loaders[what](), split=splits.get(what))))
        for what in cases
    ]


REFUSED = {
    "other order": (2, "RingMismatchError", "input tokens (checksum)"),
    "other length": (2, "RingMismatchError", "expected equal numbers, got one more on rank 1"),
    "world sampler": (
        4,
        "RingConfigError",
        "DistributedSampler of 2 data replicas, got 4; give it num_replicas=",
    ),
    "split twice": (4, "RingConfigError", "expected no split=True with a DistributedSampler"),
    "iterable": (4, "RingConfigError", "split=True"),
}


@pytest.mark.parametrize("world", [2, 4])
def test_loaders_that_give_ranks_of_a_ring_other_batches_are_refused_on_every_rank(rank_pool, world):
    cases = {what: case for what, case in REFUSED.items() if case[0] == world}
    for answers in rank_pool(world).run(refused, list(cases)):
        for message, (_, name, text) in zip(answers, cases.values(), strict=True):
            assert message.startswith(name) and text in message


class Documents(Dataset[dict[str, Tensor]]):
    """Documents of random tokens and lengths, some prompts without labels; counts the bytes that are read."""

    def __init__(self, count: int, longest: int) -> None:
        generator = torch.Generator().manual_seed(3)
        self.lengths = torch.randint(1, longest + 1, (count,), generator=generator).tolist()
        self.texts = [torch.randint(1, 200, (length,), generator=generator) for length in self.lengths]
        self.bytes_read = 0

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.part(index, 0, self.lengths[index])

    def part(self, index: int, start: int, stop: int) -> dict[str, Tensor]:
        ids = self.texts[index][start:stop]
        self.bytes_read += ids.nbytes
        unlabelled = torch.arange(start, stop)[: len(ids)] < self.lengths[index] // 4
        return {"input_ids": ids, "labels": ids.masked_fill(unlabelled, -100)}


class SlicedDocuments(Documents):
    slice = Documents.part

    def length(self, index: int) -> int:
        return self.lengths[index]


def slices_and_wholes(rank: int, world_size: int, layout: str, packed: bool) -> tuple[int, int]:
    """Batches by slices equal those of whole samples; the bytes that this rank read, and those of all samples."""
    pattern = {"causal": True, "documents": packed}
    session = forking_session(2, layout=layout, pattern=pattern)
    sliced, whole = SlicedDocuments(40, 300), Documents(40, 300)
    options = {"batch_size": 2, "shuffle": True, "lengths": sliced.lengths}
    if packed:
        rows = PackedRows(whole, whole.lengths, 301)
        parts = [
            {"document_ids": rows.document_ids(row), **rows.slice(row, 0, 301)} for row in range(len(rows))
        ]
        expected, options["pack_tokens"] = session.loader(parts, 2, shuffle=True), 301
    else:
        expected = session.loader(whole, **options)
    for batch, second in zip(session.loader(sliced, **options), expected, strict=True):
        assert batch.keys() == second.keys()
        for key in batch:
            assert torch.equal(batch[key], second[key]), key
    return sliced.bytes_read, sum(sliced.lengths) * 8


@pytest.mark.parametrize(("layout", "packed"), [("contiguous", False), ("zigzag", False), ("zigzag", True)])
def test_a_rank_reads_the_tokens_that_it_keeps(rank_pool, layout, packed):
    """And gets what it would have got of whole samples: inputs, labels, positions, and the tokens to count."""
    read = rank_pool(2).run(slices_and_wholes, layout, packed)
    everything = read[0][1]
    for mine, _ in read:
        assert 0.35 * everything < mine < 0.65 * everything
    # A label is the token after the run of a shard: one more for each run of each sample.
    assert everything <= sum(mine for mine, _ in read) < 1.1 * everything


def plans_ahead(rank: int, world_size: int, ahead: bool) -> tuple[list[list[Tensor]], list[str]]:
    """The local batches and the attention over each; the threads that planned a pass or made its steps."""
    planners: list[str] = []
    session = forking_session(2, pattern={"causal": True, "documents": True})
    for cache in (plan._build_plan, layout.choose_layout):
        cache.cache_clear()
    session.run_mesh.owners[ContextCache].by_key.clear()
    documents, generator, result = Documents(60, 90), torch.Generator().manual_seed(5), []
    loader = session.loader(documents, 2, shuffle=True, lengths=documents.lengths, pack_tokens=401)
    loader.ahead = loader.ahead if ahead else None

    def noted(real: Any) -> Any:
        def note(*args: Any) -> Any:
            planners.append(f"{real.__name__} in {threading.current_thread().name}")
            return real(*args)

        return note

    with pytest.MonkeyPatch.context() as patches:
        for module, name in (
            (plan, "find_head_classes"), (lowering, "_keep_for_the_end"), (choose, "make_auto")
        ):  # fmt: skip
            patches.setattr(module, name, noted(getattr(module, name)))
        for batch in loader:
            shape = (3, 2, 2, batch["input_ids"].shape[1], 8)
            q, k, v = torch.randn(shape, generator=generator).requires_grad_()
            out = session.attention()(q, k, v)
            result.append([batch["input_ids"], out.detach(), *torch.autograd.grad(out.sum(), (q, k, v))])
    return result, planners


def test_the_next_batch_is_planned_in_a_thread(rank_pool):
    """Its layout always, its passes from the third batch on, when one was attended to; bits do not change."""
    inline, apart = (rank_pool(2).run(plans_ahead, ahead) for ahead in (False, True))
    for (expected, everything), (result, planners) in zip(inline, apart, strict=True):
        assert len(result) == len(expected) >= 4
        for item, second in zip(result, expected, strict=True):
            assert all(torch.equal(x, y) for x, y in zip(item, second, strict=True))
        assert any("make_auto" in item for item in everything)
        assert all("MainThread" in item for item in everything), "nothing is read ahead"
        main = [item for item in planners if "MainThread" in item]
        assert sorted(item.split()[0] for item in planners) == sorted(item.split()[0] for item in everything)
        assert 0 < len(main) <= 2 * len(everything) // len(result)
        assert not any("make_auto" in item for item in main)


def dies_beside_its_workers(rank: int, world_size: int, folder: str) -> Failure:
    """Rank 1 is killed while its workers live; how rank 0 hears of it, and after how many seconds."""
    session = forking_session(2, heartbeat_timeout_seconds=20.0)
    batches = iter(session.loader(Numbered(), 1, num_workers=2))
    next(batches)
    if rank == 1:
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        Path(folder, "workers").write_text(" ".join(children))
        os.kill(os.getpid(), signal.SIGKILL)
    return catch_failure(list, batches)


def test_workers_end_with_their_rank_and_hide_no_death(tmp_path):
    """They inherit its sockets, and torch's own look for their parent every five seconds only."""
    survivor, _ = run_ranks_collect(dies_beside_its_workers, 2, str(tmp_path), grace_s=60)
    failure = survivor.value
    assert failure.error == "RingPeerError" and "rank 1" in failure.text
    assert failure.seconds < 4.0
    workers = Path(tmp_path, "workers").read_text().split()
    assert len(workers) == 2
    assert not [pid for pid in workers if _runs(Path("/proc", pid, "stat"))]


def _runs(stat: Path) -> bool:
    """Whether a process is more than an entry that nobody has asked for yet."""
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"
