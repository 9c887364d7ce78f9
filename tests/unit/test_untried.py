"""A version above the highest that was tried is a line in the log, and no refusal."""

from __future__ import annotations

import pytest

from ds_ring.compat import untried


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
