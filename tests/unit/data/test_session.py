"""What a session and its loaders refuse, on one rank."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_ring.data.dynamic_ring.assignment import Assigned, joined
from ds_ring.data.dynamic_ring.sub_rings import SubRing
from ds_ring.data.model_needs import WholeTensors
from ds_ring.data.packing import DocumentPart
from ds_ring.data.session import end_session
from ds_ring.errors import RingConfigError, RingShapeError
from tests.refusals import Refusals, refuse
from tests.sessions import session_of

IDS = torch.arange(1, 9)


class Stream(torch.utils.data.IterableDataset[Any]):
    """A data set without an index."""

    def __iter__(self) -> Any:
        return iter(())


class Sliced(torch.utils.data.Dataset[Any]):
    """A data set that is read by slices, with a sample of so many tokens."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def __len__(self) -> int:
        return 1

    def length(self, index: int) -> int:
        return self.tokens

    def slice(self, index: int, start: int, stop: int) -> Any:
        return {"input_ids": IDS[start:stop]}


def test_one_sequence_has_no_encoder() -> None:
    session = session_of()
    local = session.shard_batch({"input_ids": IDS[None]})
    assert session.gather(local["input_ids"]).equal(IDS[None])
    with pytest.raises(RingShapeError, match="expected the batch of an encoder-decoder, got one sequence"):
        session.gather(local["input_ids"], encoder=True)


def with_images() -> Any:
    session = session_of(dynamic_ring=True)
    session.needs.whole = WholeTensors()
    return session.loader(Sliced(8), 1)


def ended() -> Any:
    session = session_of()
    end_session(session, "the test is over")
    end_session(session, "and over")
    return session.shard_batch({"input_ids": IDS[None]})


def join(**sample: Tensor) -> Any:
    assigned = Assigned(SubRing(0, 1, (0,)), ((0, 1),), (DocumentPart(0, 0, 8, 0),), 7, 0)
    return joined(assigned, [sample], packed=False, pad_values={})


RAGGED = [{"input_ids": IDS[:n], "labels": IDS[:n], "image_ids": IDS[:n] % 3} for n in (8, 5)]


def load_ragged(**pad_values: float) -> Any:
    """Return a batch of samples that are not equally long."""
    return next(iter(session_of().loader(RAGGED, 2, lengths=[8, 5], pad_values=pad_values)))  # type: ignore[arg-type]


def join_ragged(**pad_values: float) -> Any:
    """Return what a dynamic ring makes of the same samples."""
    pieces = DocumentPart(0, 0, 8, 0), DocumentPart(1, 0, 5, 0)
    return joined(Assigned(SubRing(0, 1, (0, 1)), ((0, 1),), pieces, 7, 0), RAGGED, False, pad_values)


REFUSED: Refusals = {
    **{
        f"padding of unknown value: {load.__name__}": (
            load, RingShapeError,
            r"image_ids: expected one length, or the value of its padding, got 5, 8; .*pad_values=",
        )
        for load in (load_ragged, join_ragged)
    },
    "a value for padding, no lengths": (
        lambda: session_of().loader([], 1, pad_values={"image_ids": -1}), RingConfigError,
        "pad_values: expected lengths=... and no collate_fn, got no lengths",
    ),
    "a value for padding of labels": (
        lambda: load_ragged(labels=0), RingConfigError,
        r"pad_values: expected keys of your own, got \['labels'\]",
    ),
    **{
        f"a sample of {tokens} tokens": (
            lambda tokens=tokens: next(iter(session_of().loader(Sliced(tokens), 1))), RingShapeError,
            rf"length: expected samples of 1 to 2147483647 tokens, got \[{tokens}\]",
        )
        for tokens in (0, 2**31)
    },
    "a stream": (
        lambda: session_of().loader(Stream(), 1), RingConfigError,
        "expected a data set with indices, got Stream",
    ),
    "images in dynamic rings": (with_images, RingConfigError, "expected no dynamic_ring with images"),
    "a session that has ended": (ended, RingConfigError, "got one that ended: the test is over"),
    **{
        f"dynamic rings of {name} alone": (
            lambda name=name: join(**{name: IDS}), RingShapeError, "expected input_ids in sample 0, got"
        )
        for name in ("labels", "tokens")
    },
}  # fmt: skip
test_it_is_refused = refuse(REFUSED)


@pytest.mark.parametrize("load", [load_ragged, join_ragged])
def test_padding_of_keys_of_ones_own_has_the_value_that_was_given(load: Callable[..., Any]) -> None:
    batch = load(image_ids=-1)
    assert batch["image_ids"].tolist() == [(IDS % 3).tolist(), [1, 2, 0, 1, 2, -1, -1, -1]]
    assert batch["labels"][1, 5:].eq(-100).all() and batch["input_ids"][1, 5:].eq(0).all()


def test_labels_of_whole_samples_are_stacked() -> None:
    texts = [{"input_ids": IDS[:n], "labels": torch.tensor(n)} for n in (8, 5)]
    batch = next(iter(session_of().loader(texts, 2, lengths=[8, 5])))  # type: ignore[arg-type]
    assert batch["labels"].tolist() == [8, 5]


def test_log_probabilities_of_a_model_that_returns_its_logits_and_of_one_that_returns_none() -> None:
    session, logits = session_of(), torch.randn(1, 8, 5)
    batch = {"input_ids": IDS[None], "shift_labels": IDS[None] % 5}
    plain = session.logprobs(lambda **inputs: logits, batch)
    named = session.logprobs(lambda **inputs: SimpleNamespace(logits=logits), batch)
    wanted = -torch.nn.functional.cross_entropy(logits[0], IDS % 5, reduction="none")
    torch.testing.assert_close(plain[0], wanted)
    assert torch.equal(plain, named)
    with pytest.raises(RingShapeError, match=r"logprobs: expected logits, .*, got tuple"):
        session.logprobs(lambda **inputs: (logits,), batch)
