"""Tests of refusals, made of tables: a call, the type of its error, and words of the message.

REFUSED: Refusals = {"a number": (lambda: Causal() | 3, RingPatternError, "got int")}
test_it_is_refused = refuse(REFUSED)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

Refusals = Mapping[str, tuple[Callable[[], Any], type[Exception], str]]


def refuse(cases: Refusals, compiling: bool = False) -> Callable[..., None]:
    """Make the test of a table, a case each; `compiling`: the calls take themselves for compiled code."""

    @pytest.mark.parametrize("case", cases)
    def test(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
        call, error, words = cases[case]
        if compiling:
            monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
        with pytest.raises(error, match=words):
            call()

    return test
