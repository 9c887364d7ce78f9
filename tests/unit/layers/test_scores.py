"""Terms of keys that travel with the keys."""

from __future__ import annotations

import pytest
import torch

from ds_ring.layers.scores import Alibi, with_key_terms


@pytest.mark.parametrize(("dtype", "error"), [(torch.bfloat16, 2e-5), (torch.float32, 1e-7)])
def test_terms_of_keys_are_added_to_scores_unrounded(dtype: torch.dtype, error: float) -> None:
    """The terms themselves are numbers of the dtype; 1 / scale has more bits than one of bfloat16."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.zeros(1, 2, 5, 6, dtype=dtype) for _ in range(2))
    terms = torch.randn(1, 2, 5, generator=generator).to(dtype)
    wide_q, wide_k = with_key_terms(q, k, terms, 0.3)
    assert wide_q.shape[-1] == wide_k.shape[-1] == 8
    scores = 0.3 * wide_q.double() @ wide_k.double().mT
    torch.testing.assert_close(scores, terms.double()[:, :, None].expand(scores.shape), atol=0, rtol=error)


@pytest.mark.parametrize("both_ways", [False, True])
def test_alibi_is_a_slope_times_the_distance(both_ways: bool) -> None:
    head, query, key = torch.tensor([0, 1, 1]), torch.tensor([7, 7, 2]), torch.tensor([3, 7, 6])
    found = Alibi((0.5, 0.25), both_ways)(torch.ones(3), 0, head, query, key)
    assert found.tolist() == [1 - 0.5 * 4, 1.0, 1 + (-0.25 if both_ways else 0.25) * 4]
