"""The Triton kernel of the merge: in Triton's interpreter where triton is installed, else by its source."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
import torch

import ds_ring
from ds_ring.ring.merge import MAX_PARTS
from tests.machine import interpreted
from tests.merge_cases import cases, into_accumulator, wrong, wrong_parts


@pytest.fixture
def kernels() -> Iterator[ModuleType]:
    """The module of the merge, interpreted, whatever imported it before."""
    with interpreted("ds_ring.cuda.merge") as module:
        yield module


@pytest.mark.skipif(find_spec("triton") is None, reason="triton comes with torch's CUDA wheels")
@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu/test_merge.py runs it on the GPU")
@pytest.mark.parametrize("step", [1, 31])  # 31 has no factor in common with 4 views, 3 dtypes and 3 widths
@pytest.mark.day("31")
def test_the_interpreted_kernel_merges_every_case_as_float64(step: int, kernels: ModuleType) -> None:
    launch = kernels.launch
    chosen = list(cases())[::step]
    found = [what for case in chosen for what in wrong(case, into_accumulator(launch))]
    found += [what for case in chosen for what in wrong_parts(case, launch)]
    assert not found, found


def test_no_size_that_differs_from_hop_to_hop_has_a_variant_of_its_own() -> None:
    """All numbers but the strides of the outputs and of the last dimension of lse (1 for what is dense)."""
    source = (Path(ds_ring.__file__).parent / "cuda/merge.py").read_text()
    kernel = next(node for node in ast.parse(source).body if getattr(node, "name", "") == "merge_rows")
    assert isinstance(kernel, ast.FunctionDef) and f"\nMAX_PARTS = {MAX_PARTS} " in source
    options = {
        keyword.arg: ast.literal_eval(keyword.value)
        for decorator in kernel.decorator_list
        for keyword in getattr(decorator, "keywords", [])
    }
    numbers = [one.arg for one in kernel.args.args if one.annotation is None][12:]  # behind the pointers
    special = [name for name in numbers if re.fullmatch("[oabcde][0-4]|[lstuvw]3", name)]
    assert len(special) == 36 and sorted(options["do_not_specialize"]) == sorted(set(numbers) - {*special})
