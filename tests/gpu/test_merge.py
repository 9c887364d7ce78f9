"""The merge of partial results on a GPU: one Triton kernel, held against float64."""

from __future__ import annotations

from typing import Any

from ds_ring.ring.merge import add_parts_, merge_, merge_parts_
from tests.merge_cases import cases, wrong, wrong_parts


def test_the_kernel_merges_every_case_as_float64() -> None:
    found = [what for case in cases() for what in wrong(case.on("cuda"), merge_)]
    found += [what for case in cases() for what in wrong_parts(case.on("cuda"), several)]
    assert not found, found


def several(out: Any, lse: Any, parts: Any) -> None:
    """`merge_parts_`, and `add_parts_` without lse."""
    if lse is None:
        add_parts_(out, [part for part, _ in parts])
    else:
        merge_parts_(out, lse, parts)
