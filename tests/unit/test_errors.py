"""The common form of a message."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

from ds_ring.errors import RingConfigError, RingError, RingPeerError, RingShapeError


@pytest.mark.parametrize(
    ("got", "text"),
    [
        ("a sentence of the caller", "a sentence of the caller"),
        (3, "3"),
        (None, "None"),
        (list(torch.zeros(2, 3).shape), "[2, 3]"),
        ((1, 2), "tuple (1, 2)"),
        (10**40, "int of 133 bits"),
    ],
)
def test_a_message_has_what_was_expected_what_was_got_and_advice(got: Any, text: str) -> None:
    error = RingShapeError.wrong("q", "one thing", got, "pass it")
    assert str(error) == f"q: expected one thing, got {text}; pass it"
    assert isinstance(error, ValueError) and not error.peers_know


def test_an_error_of_a_peer_survives_pickling() -> None:
    """Launchers of ranks hand errors on as pickles."""
    error = RingPeerError(1, 2, None, "it is gone")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is RingPeerError and vars(again) == vars(error) and str(again) == str(error)


def test_the_error_is_of_the_class_it_is_made_by() -> None:
    assert type(RingConfigError.wrong("key", "a", "b", "c")) is RingConfigError
    assert type(RingError.wrong("key", "a", "b", "c")) is RingError


def test_a_value_whose_repr_raises_is_named_by_its_type() -> None:
    class Silent:
        def __repr__(self) -> str:
            raise RuntimeError

    assert "got Silent, whose repr raises RuntimeError" in str(RingError.wrong("x", "a", Silent(), "b"))
