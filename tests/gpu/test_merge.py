"""The merge of partial results on a GPU: one Triton kernel, held against float64."""

from __future__ import annotations

from ds_ring.runtime.merge import merge_
from tests.merge_cases import cases, wrong


def test_the_kernel_merges_every_case_as_float64() -> None:
    found = [what for case in cases() for what in wrong(case.on("cuda"), merge_)]
    assert not found, found
