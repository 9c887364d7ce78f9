"""Terms of keys that travel with the keys."""

from __future__ import annotations

import pytest
import torch

from ds_ring.layers.scores import with_key_terms


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
