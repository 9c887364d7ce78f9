"""Loaders of one rank go on in mid epoch; samples of a batch for smaller rings become each ring's batch."""

from __future__ import annotations

import gc
import multiprocessing
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from ds_ring.data.dynamic_ring.assignment import (
    Assigned,
    AssignedBatches,
    AssignedSamples,
    DynamicRing,
    joined,
)
from ds_ring.data.loader import NextBatch, RingLoader, SampleOrder, ordered_loader
from ds_ring.data.packing import PackedRows
from ds_ring.errors import RingConfigError, RingShapeError
from tests.clock import wait_until
from tests.dist.test_dynamic_ring import LONGEST, SAMPLES, Machine, Texts
from tests.dist.test_loader import Numbered, _two_epochs, loader_of, numbers
from tests.sessions import session_of


@pytest.mark.parametrize("kind", ["own", "wrapped", "stream", "distributed"])
def test_an_epoch_goes_on_where_it_was(kind: str) -> None:
    """Real ranks, replicas and workers: tests/dist/test_loader.py."""
    first, second = _two_epochs(session_of(), kind)
    for epoch in (first, second):
        assert sorted(number for batch in epoch for number in batch) == list(range(1, 11))
    assert (first != second) is (kind != "stream")


@pytest.mark.parametrize("kind", ["own", "wrapped"])
def test_an_epoch_goes_on_where_it_was_again_and_again(kind: str) -> None:
    expected, state, found = numbers(loader_of(session_of(), kind)), None, []
    for _ in range(5):
        loader = loader_of(session_of(), kind)
        if state is not None:
            loader.load_state_dict(state)
        found += numbers(islice(iter(loader), 1))
        state = loader.state_dict()
    assert found == expected


class Labelled(Texts):
    """Every token has a label, the first one, too: a ring without samples has a token that must not count."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.texts[index], "labels": self.texts[index]}


def assigned_to_ranks(
    dataset: Any, ring_size: int, batch: int, packed: bool, replica: tuple[int, int] = (0, 1)
) -> list[list[Assigned]]:
    """What each rank of a ring is given of every batch of an epoch."""
    texts = Labelled()
    found = []
    for rank in range(ring_size):
        rows = hasattr(dataset, "rows")
        lengths = None if rows else texts.lengths
        order = SampleOrder(
            len(dataset), batch, replica, shuffle=True, seed=3, drop_last=False, lengths=lengths
        )
        session = SimpleNamespace(
            dynamic=DynamicRing(times=Machine()), mesh=SimpleNamespace(ring_size=ring_size, ring_rank=rank)
        )
        batches = AssignedBatches(order, dataset, lengths or (), 100, packed, session)
        found.append([one for (one,) in batches])
        assert len(found[-1]) == len(batches)
    return found


@pytest.mark.parametrize(("packed", "batch"), [(False, 6), (True, 4), (False, 1), (True, 1)])
def test_every_sample_of_a_batch_is_on_one_ring(packed: bool, batch: int) -> None:
    texts = Labelled()
    dataset = PackedRows(texts, texts.lengths, LONGEST // 2) if batch == 4 else texts
    ranks, seen, sizes = assigned_to_ranks(dataset, 4, batch, packed), defaultdict(set), set()
    for number, of_ranks in enumerate(zip(*ranks, strict=True)):
        assert len({one.crc for one in of_ranks}) == len({one.longest for one in of_ranks}) == 1
        tokens = defaultdict(set)
        for rank, one in enumerate(of_ranks):
            assert one.ring.first <= rank < one.ring.first + one.ring.ranks
            sizes.add((one.ring.ranks, bool(one.ring.samples)))
            tokens[one.ring.first].add(one.pieces if one.ring.samples else ())
            check_joined(joined(one, AssignedSamples(dataset)[one][1], packed, {}), one, texts, packed)
        assert all(len(pieces) == 1 for pieces in tokens.values()), "ranks of a ring hold the same"
        for (pieces,) in tokens.values():
            for piece in pieces:
                span = (piece.start, piece.stop)
                assert span not in seen[number, piece.document]
                seen[number, piece.document].add(span)
        assert (
            of_ranks[0].longest
            == max(
                stop - start
                for (batch_of, _), spans in seen.items()
                if batch_of == number
                for start, stop in spans
            )
            - 1
        )
    assert {document for _, document in seen} == set(range(SAMPLES)) and sizes != {(4, True)}
    assert ((1, False) in sizes) is (batch == 1), "ranks without samples"


def check_joined(batch: dict[str, Tensor], one: Assigned, texts: Texts, packed: bool) -> None:
    """The samples one after the other, or in rows; a ring without samples has a token that counts nothing."""
    if not one.ring.samples:
        assert batch["input_ids"].numel() == 1 and bool((batch["labels"] == -100).all())
        assert "attention_mask" not in batch or not batch["attention_mask"].any()
        return
    wanted = [
        {key: value[piece.start : piece.stop] for key, value in texts[piece.document].items()}
        for piece in one.pieces
    ]
    for key in ("input_ids", "labels"):
        if packed:
            assert torch.equal(batch[key][0], torch.cat([sample[key] for sample in wanted]))
            continue
        for row, sample in zip(batch[key], wanted, strict=True):
            assert torch.equal(row[: len(sample[key])], sample[key])
            assert bool((row[len(sample[key]) :] == (0 if key == "input_ids" else -100)).all())
    if packed:
        lengths = torch.tensor([len(sample["labels"]) for sample in wanted])
        expected = torch.arange(len(wanted)).repeat_interleave(lengths)
        assert torch.equal(batch["document_ids"][0], expected)


class Drawn(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Samples that are drawn when they are read, by a worker."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.randint(1, 1000, (8,))
        return {"input_ids": ids, "labels": ids}


def test_workers_draw_anew_in_each_epoch_and_alike_on_the_ranks_of_a_ring() -> None:
    epochs = [[], []]
    for of_rank in epochs:  # two ranks of one replica, whose own generators differ
        torch.rand(1 + len(epochs[0]))
        loader = session_of().loader(Drawn(), 1, num_workers=1, seed=3)
        of_rank += [[batch["input_ids"].tolist() for batch in loader] for _ in range(2)]
    assert epochs[0] == epochs[1]
    assert epochs[0][0] != epochs[0][1]
    order = SampleOrder(2, 1, (1, 2), shuffle=False, seed=3, drop_last=False)
    other = ordered_loader(Drawn(), order, num_workers=1)
    assert next(batch["input_ids"].tolist() for batch in other) not in epochs[0][0], (
        "replicas draw other samples"
    )


def test_a_ring_of_one_rank_takes_everything() -> None:
    (batches,) = assigned_to_ranks(Labelled(), 1, 6, False)
    assert {len(one.pieces) for one in batches} == {6} and {one.ring.ranks for one in batches} == {1}


@pytest.mark.parametrize("batch", [torch.arange(8)[None], [torch.arange(8)], None])
def test_batches_without_names_are_refused(batch):
    with pytest.raises(RingShapeError, match=f"mapping of names to tensors, got {type(batch).__name__}"):
        next(iter(session_of().wrap([batch])))


WRONG_STATES = {
    "beyond the data": ({"epoch": 0, "samples": 12}, r"at most 10 samples, got 12"),
    "far beyond": ({"epoch": 0, "samples": 10**40}, r"at most 10 samples"),
    "within a batch": ({"epoch": 0, "samples": 3}, r"a multiple of 2 samples"),
    "another loader's": ({"epoch": 0, "batches": 1}, r"whole numbers .* got \['batches', 'epoch'\]"),
    "a later epoch than there can be": ({"epoch": 1 << 70, "samples": 0}, r"whole numbers"),
    "before the first": ({"epoch": 0, "samples": -2}, r"whole numbers"),
    "true": ({"epoch": True, "samples": 0}, r"whole numbers"),
    "a number of another kind": ({"epoch": 0.0, "samples": 2.0}, r"whole numbers"),
    "keys of two kinds": ({1: 2, "a": 3}, r"got \['1', 'a'\]"),
    "no mapping": ([1, 2], r"got list \[1, 2\]"),
    "nothing": (None, r"got None"),
}


@pytest.mark.parametrize("case", WRONG_STATES)
def test_a_state_of_something_else_is_refused(case: str) -> None:
    """(One beyond the data set gave an epoch without a batch.)"""
    state, words = WRONG_STATES[case]
    loader = loader_of(session_of(), "own")
    with pytest.raises(RingConfigError, match=f"loader state: expected .*{words}"):
        loader.load_state_dict(state)
    assert len(numbers(loader)) == len(loader), "it was changed by what was refused"


def test_a_state_at_the_end_of_an_epoch_is_one() -> None:
    loader = loader_of(session_of(), "own")
    loader.load_state_dict({"epoch": 0, "samples": 10})
    assert numbers(loader) == [] and loader.epoch == 1 and len(numbers(loader)) == 5


def test_a_stream_that_is_too_short_is_an_error() -> None:
    """Which its length does not tell."""
    loader = loader_of(session_of(), "stream")
    loader.load_state_dict({"epoch": 0, "batches": 99})
    with pytest.raises(RingConfigError, match="over 99 batches a replica, got 5"):
        list(loader)


@pytest.mark.parametrize("generator", [3, "abc", torch.zeros(3), torch.zeros(16, dtype=torch.uint8), []])
def test_a_generators_state_that_is_none_is_refused(generator: Any) -> None:
    data = DataLoader(Numbered(), 2, shuffle=True, generator=torch.Generator())
    loader = session_of().wrap(data)
    with pytest.raises(RingConfigError, match=r"expected a torch\.Generator's state, got "):
        loader.load_state_dict({"epoch": 0, "batches": 1, "generator": generator})


def test_a_position_in_a_shuffled_epoch_without_its_order_is_refused() -> None:
    """(Of an older version: it would leave out batches of another permutation.)"""
    loader = session_of().wrap(DataLoader(Numbered(), 2, shuffle=True))
    with pytest.raises(RingConfigError, match=r"expected a torch\.Generator's state, got None; .* anew"):
        loader.load_state_dict({"epoch": 1, "batches": 1})
    loader.load_state_dict({"epoch": 1, "batches": 0})


class OwnSampler(torch.utils.data.Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(10).tolist())

    def __len__(self) -> int:
        return 10


def own_generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


WEIGHTS = [1.0, 2.0, 3.0] * 3 + [1.0]
SHUFFLING: dict[str, Callable[[], dict[str, Any]]] = {
    "shuffle": lambda: {"shuffle": True},
    "generator": lambda: {"shuffle": True, "generator": own_generator()},
    "the sampler's generator": lambda: {"sampler": RandomSampler(range(10), generator=own_generator())},
    "the loader's generator": lambda: {"sampler": RandomSampler(range(10)), "generator": own_generator()},
    "replacement": lambda: {"sampler": RandomSampler(range(10), replacement=True, num_samples=40)},
    "subset": lambda: {"sampler": SubsetRandomSampler(range(10))},
    "weighted": lambda: {"sampler": WeightedRandomSampler(WEIGHTS, 10)},
    "own sampler": lambda: {"sampler": OwnSampler()},
    "batch sampler": lambda: {"batch_sampler": BatchSampler(RandomSampler(range(10)), 2, False)},
    "own batch sampler": lambda: {"batch_sampler": OwnBatches()},
    "workers": lambda: {"shuffle": True, "num_workers": 1},
    "lasting workers": lambda: {
        "shuffle": True, "num_workers": 1, "persistent_workers": True, "generator": own_generator(),
    },
}  # fmt: skip


class OwnBatches:
    def __iter__(self) -> Iterator[list[int]]:
        return iter(torch.randperm(10).view(5, 2).tolist())

    def __len__(self) -> int:
        return 5


def make_shuffling(kind: str) -> DataLoader[Any]:
    options = SHUFFLING[kind]()
    if "batch_sampler" not in options:
        options["batch_size"] = 2
    loader: DataLoader[Any] = DataLoader(Numbered(), **options)
    _made.append(loader)
    return loader


_made: list[DataLoader[Any]] = []


@pytest.fixture(autouse=True)
def no_worker_outlives_a_test(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """(A lasting worker held the lock of conftest.py's door, and the suite waited for ever.)"""
    for module in (torch.utils.data._utils, torch.utils.data._utils.worker):  # the end of one takes so long
        monkeypatch.setattr(module, "MP_STATUS_CHECK_INTERVAL", 0.1)
    yield
    for loader in _made:
        if loader._iterator is not None:
            loader._iterator._shutdown_workers()  # type: ignore[attr-defined]
    _made.clear()
    if multiprocessing.active_children():
        gc.collect()
    assert not multiprocessing.active_children()


def seed_all(loader: DataLoader[Any], seed: int) -> None:
    torch.manual_seed(seed)
    for holder in (loader, loader.sampler):
        if getattr(holder, "generator", None) is not None:
            holder.generator.manual_seed(seed)


@pytest.mark.parametrize("seeds", [[3, 4, 3], [3, None, None]], ids=["each epoch", "once"])
@pytest.mark.parametrize("kind", SHUFFLING)
def test_a_wrapped_loader_has_the_order_of_one_process(kind: str, seeds: list[int | None]) -> None:
    """(The generator was read at the first wrap, and torch's seed did not count.)"""
    plain, once, anew = (make_shuffling(kind) for _ in range(3))
    session = session_of()
    wrapper = session.wrap(once)
    assert len(session.wrap(anew)) == len(plain)
    expected, read, again = [], [], []
    for loader, make_batches, epochs in (
        (plain, lambda: plain, expected), (once, lambda: wrapper, read),
        (anew, lambda: session.wrap(anew), again),
    ):  # fmt: skip
        for seed in seeds:
            if seed is not None:
                seed_all(loader, seed)
            epochs.append(ids_of(make_batches()))
        epochs.append(torch.rand(2).tolist())  # what is left for the script
    assert read == expected
    assert again == expected
    assert expected[0] != expected[1]


@pytest.mark.parametrize("kind", SHUFFLING)
def test_a_state_goes_on_exactly_and_another_epoch_is_drawn_anew(kind: str) -> None:
    whole, part, resumed, plain = (make_shuffling(kind) for _ in range(4))
    session, last = session_of(), []
    seed_all(whole, 5)
    epochs = [ids_of(session.wrap(whole)) for _ in range(3)]
    seed_all(part, 5)
    ids_of(session.wrap(part))
    begun = iter(session.wrap(part))
    assert ids_of(islice(begun, 2)) == epochs[1][:2]
    wrapper, state = session.wrap(resumed), session.wrap(part).state_dict()
    wrapper.load_state_dict(state)
    again = wrapper.state_dict()
    assert again.keys() == state.keys() and torch.equal(again["order"], state["order"])
    before = torch.get_rng_state()
    assert ids_of(wrapper) == epochs[1][2:]
    if kind in ("generator", "the sampler's generator"):  # its own, which is where it was
        assert ids_of(wrapper) == epochs[2]
    elif "generator" not in SHUFFLING[kind]():
        assert torch.equal(torch.get_rng_state(), before), "torch's is the script's"
    wrapper.load_state_dict(state)
    wrapper.set_epoch(7)
    list(plain)  # lasting workers are seeded once
    for batches in (wrapper, plain):
        seed_all(resumed if batches is wrapper else plain, 6)
        last.append(ids_of(batches))
    assert last[0] == last[1]


def test_a_state_between_epochs_has_the_generator_as_it_is() -> None:
    """(It had the order of the epoch that was over, which the resumed run read again.)"""
    whole, resumed = make_shuffling("generator"), make_shuffling("generator")
    wrapper = session_of().wrap(whole)
    ids_of(wrapper)
    state, second = wrapper.state_dict(), ids_of(wrapper)
    resumed_wrapper = session_of().wrap(resumed)
    resumed_wrapper.load_state_dict(state)
    assert ids_of(resumed_wrapper) == second
    resumed_wrapper.load_state_dict(state)
    seed_all(resumed, 8)  # a script that seeds each epoch
    seed_all(whole, 8)
    assert ids_of(resumed_wrapper) == ids_of(wrapper)


def test_a_seed_of_a_wrap_is_in_place_of_torchs() -> None:
    loaders = [session_of().wrap(DataLoader(Numbered(), 2, shuffle=True), seed=4) for _ in range(2)]
    before = torch.get_rng_state()
    first, second = [ids_of(loaders[0]) for _ in range(2)]
    assert torch.equal(torch.get_rng_state(), before) and first != second
    torch.rand(3)
    assert [ids_of(loaders[1]) for _ in range(2)] == [first, second]


def ids_of(batches: Iterable[Mapping[str, Any]]) -> list[list[int]]:
    return [batch["input_ids"][:, 0].tolist() for batch in batches]


@pytest.mark.parametrize("is_distributed", [False, True], ids=["shuffle", "DistributedSampler"])
def test_a_wrap_in_each_epoch_goes_on_with_the_next_order(is_distributed: bool) -> None:
    """(Each wrap began at epoch 0, and set the epoch of the caller's sampler back to it, without a word.)"""
    data, session = Numbered(), session_of()
    sampler: Any = DistributedSampler(data, num_replicas=1, rank=0, seed=3) if is_distributed else None
    loader = DataLoader(data, 2, shuffle=sampler is None, sampler=sampler)
    epochs = []
    for epoch in range(3):
        if sampler is not None:
            sampler.set_epoch(epoch)
        torch.manual_seed(epoch)
        epochs.append(ids_of(session.wrap(loader)))
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    alone = session_of().wrap(loader)
    if sampler is not None:
        expected = DistributedSampler(data, num_replicas=1, rank=0, seed=3)
        for epoch, read in enumerate(epochs):
            expected.set_epoch(epoch)
            assert read == ids_of(DataLoader(data, 2, sampler=expected))
        sampler.set_epoch(5)  # of a loop that begins there
        expected.set_epoch(5)
        assert ids_of(alone) == ids_of(DataLoader(data, 2, sampler=expected))
    else:
        for epoch in range(3):  # one wrap before the loop
            torch.manual_seed(epoch)
            assert ids_of(alone) == epochs[epoch]


def test_wrappers_are_remembered_by_loader_and_not_without_end() -> None:
    session, loaders = session_of(), [DataLoader(Numbered(), 2) for _ in range(20)]
    wrappers = [session.wrap(loader) for loader in loaders]
    assert session.wrap(loaders[-1]) is wrappers[-1] and len({*map(id, wrappers)}) == 20
    assert session.wrap(loaders[-1], split=True) is not wrappers[-1]
    assert session.wrap(loaders[0]) is not wrappers[0]  # only the latest are


class Boom(Exception):
    pass


def test_the_next_batch_is_read_while_the_model_works_and_its_error_is_raised_there() -> None:
    prepared: list[tuple[int, bool]] = []

    def prepare(number: int) -> int:
        prepared.append((number, threading.current_thread() is threading.main_thread()))
        if number == 3:
            raise Boom
        return 10 * number

    order = SampleOrder(5, 1, (0, 1), shuffle=False, seed=0, drop_last=False)
    loader = RingLoader(range(5), lambda read: {"read": read}, order, ahead=prepare)
    batches = iter(loader)
    assert next(batches) == {"read": 0}
    assert loader.state_dict()["samples"] == 1  # what was read ahead does not count
    wait_until(lambda: len(prepared) == 2, 30.0)
    assert prepared == [(0, False), (1, False)]
    assert [next(batches)["read"], next(batches)["read"]] == [10, 20]
    with pytest.raises(Boom):
        next(batches)


def test_a_loader_that_reads_ahead_ends_its_epoch() -> None:
    order = SampleOrder(3, 1, (0, 1), shuffle=False, seed=0, drop_last=False)
    loader = RingLoader(range(3), lambda read: {"read": read}, order, ahead=lambda read: read)
    assert [[batch["read"] for batch in loader] for _ in range(2)] == [[0, 1, 2]] * 2
    assert loader.state_dict() == {"epoch": 2, "samples": 0}
    assert list(NextBatch(iter(range(2)), lambda read: read)) == [0, 1]
    left = [one for one in threading.enumerate() if "next-batch" in one.name]
    # `close` does not wait for what a thread does now
    wait_until(lambda: not [one for one in left if one.is_alive()][1:], 10.0)


def test_what_the_model_may_change_is_not_read_ahead() -> None:
    """Documents of an iterable, or of a data set that this process reads: a step may come before."""
    section = {"pattern": {"causal": True, "documents": True}}
    session = session_of(**section)
    assert session.wrap(DataLoader(Numbered(), 2)).ahead is None
    assert session.loader(Numbered(), 2).ahead is None
    assert session.wrap([]).ahead is None
    assert session.wrap(DataLoader(Numbered(), 2, num_workers=1)).ahead is not None
    assert session.loader(Numbered(), 2, lengths=[9] * 10, pack_tokens=30).ahead is not None
    assert session_of().wrap(DataLoader(Numbered(), 2, num_workers=1)).ahead is None
