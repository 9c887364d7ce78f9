"""What a session and its loaders refuse, on one rank."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_ring.comm.mesh import RingMesh
from ds_ring.data.config_agreement import rendezvous_settings
from ds_ring.data.dynamic_ring.assignment import Assigned, joined
from ds_ring.data.dynamic_ring.sub_rings import SubRing
from ds_ring.data.loss import RingLoss
from ds_ring.data.model_needs import WholeTensors
from ds_ring.data.packing import DocumentPart
from ds_ring.data.random_draws import _SharedDraws
from ds_ring.data.run_folder import _write_late
from ds_ring.data.session import end_session
from ds_ring.data.stop_request import SIGNALS, StopRequest
from ds_ring.errors import RingConfigError, RingShapeError
from ds_ring.health.client import LateNotice
from ds_ring.health.rendezvous import Rendezvous
from ds_ring.limits import Limit
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


def labelled(function: str, values: Any) -> Any:
    """Call the session with values and a batch that has labels."""
    session = session_of()
    batch = session.shard_batch({"input_ids": IDS[None], "labels": IDS[None]})
    return getattr(session, function)(values, batch)


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
    "a loss that is a number": (lambda: session_of().mean_loss(1.0), RingShapeError,  # type: ignore[arg-type]
        "mean_loss: expected a model's loss, got float; give labels"),
    "a loss with its mean": (
        lambda: session_of().mean_loss(RingLoss(*torch.zeros(3))), RingShapeError,  # type: ignore[arg-type]
        "mean_loss: expected a tensor, got what engine.ring.loss returns; pass loss.backward_loss"),
    "logits in a list": (lambda: labelled("loss", [1]), RingShapeError,
        r"loss: expected logits \[B, S, V\], got list; pass output.logits"),
    "losses without a batch by names": (
        lambda: session_of().document_losses(IDS, [IDS]), RingShapeError,  # type: ignore[arg-type]
        "document_losses: expected a batch by names, got list; pass all"),
    "fewer losses than tokens": (lambda: labelled("document_losses", torch.zeros(1, 5)), RingShapeError,
        r"one loss for each local token of a batch with shift_labels, \[1, 8\], got torch.float32 \[1, 5\]"),
    "losses that are whole numbers": (lambda: labelled("document_losses", IDS[None]), RingShapeError,
        r"\[1, 8\], got torch.int64 \[1, 8\]"),
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


def test_losses_of_documents_are_means_of_their_labelled_tokens() -> None:
    session = session_of(pattern={"documents": True})
    documents = torch.tensor([[4, 4, 4, 9, 9, 9, 9, -1], [5, 5, 5, 5, 5, 5, 7, 7]])
    labels = torch.where(documents == 5, -100, 1)
    batch = session.shard_batch({"input_ids": IDS.repeat(2, 1), "labels": labels, "document_ids": documents})
    losses = torch.arange(16.0).view(2, 8)
    means, counts = session.document_losses(losses, batch)
    # The last token of a document predicts nothing: of 4 tokens 0 and 1 are left, of 9 tokens 3 to 5.
    assert counts.tolist() == [2, 3, 0, 1] and means[[0, 1, 3]].tolist() == [0.5, 4.0, 14.0]
    assert means.dtype == torch.float64 and bool(means[2].isnan())


def test_a_signal_stops_all_ranks_after_a_step() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    request = StopRequest()
    try:
        assert not request.came_to_any(RingMesh.single(), torch.device("cpu"))
        signal.raise_signal(signal.SIGUSR1)
        assert request.came_to_any(RingMesh.single(), torch.device("cpu"))
    finally:
        for number, handler in zip(SIGNALS, before, strict=True):
            signal.signal(number, handler)


def test_who_is_late_is_written_for_the_status_until_it_goes_on(tmp_path: Path) -> None:
    notice = LateNotice(1, "call 3", 7.0, Limit(60.0, "hop_timeout_seconds"), "a.py:3")
    _write_late(tmp_path, 1, notice)
    assert not any(tmp_path.iterdir())
    _write_late(tmp_path, 0, notice)
    late = json.loads((tmp_path / "rank-1.late.json").read_text())
    assert late.pop("at") == pytest.approx(time.time(), abs=60) and late == {
        "rank": 1, "seconds": 7.0, "what": "call 3", "where": "a.py:3", "limit_seconds": 60.0,
        "key": "hop_timeout_seconds",
    }  # fmt: skip
    _write_late(tmp_path, 0, 1)
    assert not any(tmp_path.iterdir())


class Region(torch.autograd.Function):
    """A region as those of checkpoints are: its backward pass may run it again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * torch.rand([])


def test_dropped_layers_are_drawn_alike_and_other_numbers_are_not() -> None:
    torch.manual_seed(3)
    own = torch.rand(2)
    torch.manual_seed(3)
    with _SharedDraws(5):
        shared = torch.rand([])
        assert torch.rand(2).equal(own)
        with pytest.raises(RingConfigError, match="layerdrop: expected draws outside of checkpointed layers"):
            Region.apply(own)
    assert shared == torch.rand([], generator=torch.Generator().manual_seed(5))


COMPLETE = {"RANK": "0", "WORLD_SIZE": "4", "MASTER_PORT": "29500", "MASTER_ADDR": "host"}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, Rendezvous(0, 4, "host", 29500, True, "0")),
        ({"RANK": "1", "TORCHELASTIC_RESTART_COUNT": "2"}, Rendezvous(1, 4, "host", 29500, False, "2")),
        ({"TORCHELASTIC_USE_AGENT_STORE": "True"}, Rendezvous(0, 4, "host", 29500, False, "0")),
        ({"MASTER_ADDR": ""}, None),
        ({"WORLD_SIZE": "x"}, None),
    ],
)
def test_how_ranks_meet_is_what_the_environment_says(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, str], expected: Rendezvous | None
) -> None:
    for name in ("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in (COMPLETE | changes).items():
        monkeypatch.setenv(name, value)
    assert rendezvous_settings() == expected


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
