"""Whether the integration takes other names of other versions, and refuses by feature what one lacks."""

from __future__ import annotations

import importlib
import sys

import pytest
from transformers import cache_utils

from ds_ring.data.batch import cache_name
from ds_ring.decode import generation
from ds_ring.errors import RingConfigError
from ds_ring.patches import guard_imports

RING_CACHE = "ds_ring.decode.ring_cache"


@pytest.fixture
def fresh_ring_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ring_cache be imported again."""
    monkeypatch.delitem(sys.modules, RING_CACHE, raising=False)
    package = sys.modules[RING_CACHE.rpartition(".")[0]]
    monkeypatch.delattr(package, "ring_cache", raising=False)


def test_the_cache_does_without_layers_that_hold_nothing(
    fresh_ring_cache: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(cache_utils, "DummyLayer", raising=False)  # as in 5.18 to 5.22
    cache = importlib.import_module(RING_CACHE).RingCache(0, 2)
    assert cache.layers == []


def test_a_name_that_is_missing_refuses_generation_alone(
    fresh_ring_cache: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(cache_utils, "LinearAttentionLayer")
    with pytest.raises(RingConfigError, match=r"generate on a ring: .*LinearAttentionLayer"):
        generation._cache_class()


def test_an_import_that_fails_is_a_refusal_by_name() -> None:
    with (
        pytest.raises(RingConfigError, match=r"pictures: expected another version of torch, .*; install one"),
        guard_imports("pictures", "torch"),
    ):
        from torch import no_such_name  # type: ignore[attr-defined]  # noqa: F401


@pytest.mark.parametrize(
    ("names", "name"),
    [
        ("x cache", "cache"),
        ("x past_key_values", "past_key_values"),
        ("x cache_params", "cache_params"),
        ("x", "past_key_values"),
    ],
)
def test_a_cache_goes_by_the_name_that_a_function_has(names: str, name: str) -> None:
    assert cache_name(names.split()) == name
