"""A version above the highest that was tried is a line in the log, and no refusal."""

from __future__ import annotations

import json

import pytest

from ds_ring.compat import require, untried
from ds_ring.errors import RingConfigError


@pytest.mark.parametrize(
    ("installed", "is_untried"),
    [("2.15.3", False), ("2.9.1+cu128", False), ("2.16.0", True), ("3.0.0a0+git1", True)],
)
def test_a_later_minor_version_is_noted_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, installed: str, is_untried: bool
) -> None:
    monkeypatch.setattr(untried, "HIGHEST", {"torch": "2.15"})
    monkeypatch.setattr(untried, "version", lambda package: installed)
    untried.note_untried.cache_clear()
    untried.note_untried()
    untried.note_untried()
    untried.note_untried.cache_clear()
    assert caplog.text.count(f"torch {installed} (tried: up to 2.15)") == is_untried


def test_a_package_that_was_not_imported_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(untried, "HIGHEST", {"no_such_package": "0.1"})
    assert untried.list_untried() == []


def test_a_package_that_is_a_folder_on_the_path_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(untried, "HIGHEST", {"tests": "0.1"})
    assert untried.list_untried() == []


def test_a_package_that_is_missing_is_named_with_its_command() -> None:
    words = r"a ring over hosts needs no_such_package: pip install no-such-package"
    with pytest.raises(RingConfigError, match=words):
        require("no_such_package.part", "a ring over hosts")
    assert require("json", "nothing") is json
