"""Keys in float8 on a GPU have the bits of the CPU; tools/gpu_first.py has rings of them."""

from __future__ import annotations

import pytest
import torch

from ds_ring.codecs.float8 import Float8Rows


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_rows_have_the_bits_of_the_cpu(dtype: torch.dtype) -> None:
    magnitudes = torch.tensor([1.0, 1e-7, 1e4, 448.0, 0.0]).repeat(1000)[:, None]
    given = [(torch.randn(1, 2, 5000, width) * magnitudes).to(dtype) for width in (128, 64)]
    found = []
    for device in ("cpu", "cuda"):
        k, v = (x.to(device) for x in given)
        rows = torch.empty(5000, 1, 2, 128 + 64 + 2, dtype=torch.uint8, device=device)
        Float8Rows.encode(k, v, rows)
        back = torch.empty_like(k), torch.empty_like(v)
        Float8Rows.decode(rows, *back)
        found.append([x.cpu() for x in (rows, *back)])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
