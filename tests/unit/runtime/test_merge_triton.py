"""The Triton kernel of the merge, in Triton's interpreter; skipped where triton is not installed."""

from __future__ import annotations

import os

import pytest
import torch

from tests.merge_cases import cases, wrong

pytest.importorskip("triton", reason="triton comes with torch's CUDA wheels")


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu/test_merge.py runs it on the GPU")
def test_the_interpreted_kernel_merges_every_case_as_float64() -> None:
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernel is decorated
    from ds_ring.runtime.merge_triton import launch

    found = [what for case in cases() for what in wrong(case, launch)]
    assert not found, found
