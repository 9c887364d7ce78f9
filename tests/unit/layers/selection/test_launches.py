"""A selection and attention to chosen keys launch little, and the host waits for three numbers of rows.

Fake CUDA tensors, counted by `tools/pass_launches.py`. (Before blocks were batched, and each read what it
chose, a forward pass at 8 Ki tokens on 8 ranks launched 115,428 operators and waited 13,680 times.)
"""

from __future__ import annotations

from argparse import Namespace
from contextlib import suppress
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from ds_ring.layers.selection import select, selected_pass
from tools.pass_launches import counted

OPTIONS = Namespace(local_tokens=512, ring_size=4, heads=8, kv_heads=2, head_dim=64, chosen=64)
LAUNCHES = 360, 340  # forward, with the selection; backward
WAITS = 2, 1  # for the range of what was chosen, for the numbers of rows; for these again


def within() -> tuple[bool, bool]:
    """Return whether launches and waits are within both budgets."""
    both = counted("select", OPTIONS)
    launches = [counts.launches <= most for counts, most in zip(both, LAUNCHES, strict=True)]
    return all(launches), all(len(counts.found) <= most for counts, most in zip(both, WAITS, strict=True))


def test_a_layer_is_within_its_launches_and_waits() -> None:
    assert within() == (True, True)


def waiting(real: Any) -> Any:
    """Return a function that also reads a number, which a fake tensor refuses."""

    def careless(*given: Any, **named: Any) -> Any:
        with suppress(RuntimeError):
            next(x for x in given if isinstance(x, Tensor)).flatten()[0].item()
        return real(*given, **named)

    return careless


@pytest.mark.night
@pytest.mark.parametrize(("module", "name"), [(select, "merge_best"), (selected_pass, "_first_true")])
def test_one_more_wait_is_found(module: Any, name: str) -> None:
    with mock.patch.object(module, name, waiting(getattr(module, name))):
        assert within() == (True, False)


@pytest.mark.night
@pytest.mark.parametrize(
    ("module", "name", "value"),
    [(select, "SCORES", {"cuda": 1 << 18}), (selected_pass, "WORKSPACE", {"cpu": 1 << 20, "cuda": 1 << 20})],
)
def test_small_tiles_and_batches_launch_more_than_the_budget(module: Any, name: str, value: Any) -> None:
    with mock.patch.object(module, name, value):
        assert within() == (False, True)


def test_rows_are_added_in_one_order_on_a_gpu() -> None:
    """By the operator that sorts: what it adds is what index_add_ adds."""
    rows, parts = torch.randint(0, 5, (12,)), torch.randn(2, 3, 4, 6, dtype=torch.float64)
    total = torch.zeros(2, 5, 6, dtype=torch.float64)
    other = total.clone()
    selected_pass._add_rows(total, rows, parts)
    other.transpose(0, 1).index_put_((rows,), parts.flatten(1, 2).transpose(0, 1), accumulate=True)
    assert torch.allclose(total, other, atol=1e-15)
