"""What a session and its loaders refuse, on one rank."""

from __future__ import annotations

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
from ds_ring.data.stop_request import PREEMPTED
from ds_ring.errors import RingConfigError, RingShapeError
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


@pytest.mark.parametrize("tokens", [0, 2**31])
def test_a_sample_of_no_length_is_refused(tokens: int) -> None:
    with pytest.raises(
        RingShapeError, match=rf"length: expected samples of 1 to 2147483647 tokens, got \[{tokens}\]"
    ):
        next(iter(session_of().loader(Sliced(tokens), 1)))


def test_a_stream_is_no_data_set_of_a_loader() -> None:
    with pytest.raises(RingConfigError, match="expected a data set with indices, got Stream"):
        session_of().loader(Stream(), 1)


def test_images_do_not_go_with_dynamic_rings() -> None:
    one = session_of(dynamic_ring=True)
    one.needs.whole = WholeTensors()
    with pytest.raises(RingConfigError, match="expected no dynamic_ring with images"):
        one.loader(Sliced(8), 1)


def test_one_sequence_has_no_encoder() -> None:
    one = session_of()
    local = one.shard_batch({"input_ids": IDS[None]})
    assert one.gather(local["input_ids"]).equal(IDS[None])
    with pytest.raises(RingShapeError, match="expected the batch of an encoder-decoder, got one sequence"):
        one.gather(local["input_ids"], encoder=True)


def test_whoever_leaves_says_that_nothing_failed() -> None:
    with pytest.raises(SystemExit) as left:
        session_of().leave()
    assert left.value.code == PREEMPTED == 75


def test_a_session_that_has_ended_shards_nothing() -> None:
    one = session_of()
    end_session(one, "the test is over")
    end_session(one, "and over")
    with pytest.raises(RingConfigError, match="got one that ended: the test is over"):
        one.shard_batch({"input_ids": IDS[None]})


@pytest.mark.parametrize("sample", [{"labels": IDS}, {"tokens": IDS}])
def test_samples_of_dynamic_rings_have_input_ids(sample: dict[str, Tensor]) -> None:
    assigned = Assigned(SubRing(0, 1, (0,)), ((0, 1),), (DocumentPart(0, 0, 8, 0),), 7, 0)
    with pytest.raises(RingShapeError, match="expected input_ids in sample 0, got"):
        joined(assigned, [sample], packed=False)


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
