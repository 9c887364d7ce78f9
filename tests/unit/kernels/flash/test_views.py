"""What a kernel computes from the queries once a pass."""

from __future__ import annotations

import torch

from ds_ring.kernels.flash.executors import Views


def test_what_queries_need_is_made_once_a_pass() -> None:
    views, q = Views(), torch.ones(2, 3)
    doubled = views.once(torch.mul, (q,), 2)
    assert views.once(torch.mul, (q,), 2) is doubled and views.once(torch.mul, (q,), 3) is not doubled
    assert Views().once(torch.mul, (q,), 2) is not doubled
