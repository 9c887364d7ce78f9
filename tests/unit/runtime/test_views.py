"""Views: kept with the tensors that they are of; a copy is made each time."""

from __future__ import annotations

import torch
from torch import Tensor

from ds_ring.runtime.views import Pair, Two, Views, some_heads

made: list[str] = []


def swapped(first: Tensor, second: Tensor, what: str) -> Two:
    made.append(what)
    return first.transpose(0, 1), second.transpose(0, 1)


def swapped_copies(first: Tensor, second: Tensor) -> Two:
    made.append("copy")
    return first.clone().transpose(0, 1), second.transpose(0, 1)


def pair() -> Pair:
    return Pair(torch.zeros(2, 3), torch.zeros(2, 3))


@torch.no_grad()
def test_views_stay_with_a_pair_from_pass_to_pass() -> None:
    made.clear()
    buffers = pair()
    for _ in range(2):
        views = Views()
        views.add(buffers)
        for _ in range(3):
            first, _second = views.of(swapped, buffers.first, buffers.second, "keys")
            assert first._version == buffers.first._version and first.data_ptr() == buffers.first.data_ptr()
        views.drop(buffers)
    assert made == ["keys"]
    views.of(swapped, buffers.first, buffers.second, "given back")
    views.of(swapped, buffers.first, buffers.second, "given back")
    assert made == ["keys", "given back", "given back"]


@torch.no_grad()
def test_a_copy_is_never_kept() -> None:
    """What a buffer holds changes: a copy that is kept would be another hop's keys."""
    made.clear()
    views, buffers = Views(), pair()
    views.add(buffers)
    for value in (1.0, 2.0):
        buffers.first.fill_(value)
        first, _second = views.of(swapped_copies, buffers.first, buffers.second)
        assert bool((first == value).all())
    assert made == ["copy", "copy"] and not buffers.made


def test_what_queries_need_is_made_once_a_pass() -> None:
    views, q = Views(), torch.ones(2, 3)
    doubled = views.once(torch.mul, (q,), 2)
    assert views.once(torch.mul, (q,), 2) is doubled and views.once(torch.mul, (q,), 3) is not doubled
    assert Views().once(torch.mul, (q,), 2) is not doubled


def test_every_second_head_is_not_all_heads() -> None:
    x = torch.zeros(1, 4, 2)
    assert some_heads(x, slice(0, 4)) is x and some_heads(x, slice(0, 4, 1)) is x
    assert some_heads(x, slice(0, 4, 2)).shape[1] == 2 and some_heads(x, slice(0, 3)).shape[1] == 3
