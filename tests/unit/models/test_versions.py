"""Whether the integration takes other names of other versions, and refuses by feature what one lacks."""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import cache_utils

from ds_ring.data.batch import cache_name
from ds_ring.decode import generation
from ds_ring.errors import RingConfigError
from ds_ring.models.checks import takes_more
from ds_ring.patches import guard_imports
from ds_ring.plugin import load_available

RING_CACHE = "ds_ring.decode.ring_cache"


@pytest.fixture
def fresh_ring_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ring_cache be imported again."""
    for name in (RING_CACHE, "ds_ring.compat.transformers"):
        monkeypatch.delitem(sys.modules, name, raising=False)
        package, _, module = name.rpartition(".")
        monkeypatch.delattr(importlib.import_module(package), module, raising=False)


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
    with pytest.raises(RingConfigError, match=r"LinearAttentionLayer.* install transformers 5.6 or later"):
        generation._cache_class()


def test_an_import_that_fails_is_a_refusal_by_name() -> None:
    with (
        pytest.raises(RingConfigError, match=r"pictures: expected another version of torch, .*; install one"),
        guard_imports("pictures", "torch"),
    ):
        from torch import no_such_name  # type: ignore[attr-defined]  # noqa: F401


def test_an_import_that_fails_inside_ds_ring_is_no_version_of_another_package() -> None:
    with pytest.raises(ImportError, match="ds_ring"), guard_imports("pictures", "torch"):
        from ds_ring.plugin import no_such_name  # type: ignore[attr-defined]  # noqa: F401
    with pytest.raises(ModuleNotFoundError, match="ds_ring"), guard_imports("pictures", "torch"):
        importlib.import_module("ds_ring.no_such_module")


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


def test_a_row_whose_module_lacks_a_name_of_a_package_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "row_of_a_later_version.py").write_text("from transformers import no_such_name\n")
    (tmp_path / "row_with_a_fault.py").write_text("from ds_ring.plugin import no_such_name\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    rows = {"later": "row_of_a_later_version.X", "here": "json.dumps"}
    assert load_available(rows) == [json.dumps]
    assert "later is left out" in caplog.text and "no_such_name" in caplog.text
    with pytest.raises(ImportError, match="ds_ring"):  # of our own is a fault
        load_available({"fault": "row_with_a_fault.X"})


@pytest.mark.parametrize(
    ("parameters", "takes"), [("x", False), ("x, **deprecated_arguments", False), ("x, **kwargs", True)]
)
def test_a_forward_that_takes_no_more_arguments_is_seen(parameters: str, takes: bool) -> None:
    forward: dict[str, Any] = {}
    exec(f"def forward({parameters}): pass", forward)
    assert takes_more(inspect.signature(forward["forward"])) == takes
