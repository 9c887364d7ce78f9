"""Check the Triton kernel that merges partial results, on a machine without a GPU.

Triton's own compiler translates it for an A100 and an H100, for every head dimension and dtype of a part;
Triton's interpreter runs it on CPU memory against float64, and its loads and stores are counted. Not
checked: speed, races, anything on a real GPU (`pytest tests/gpu` does). Needs triton, see
`verify_cuda_kernels.py`:
    python -m tools.verify_merge
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import itertools
import os
import re
import subprocess
import sys
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ds_ring.ring.merge import merge_by_operators_
from tests.merge_cases import cases, into_accumulator, wrong, wrong_parts

PART_DTYPES = {"*bf16": torch.bfloat16, "*fp16": torch.float16, "*fp32": torch.float32}
PARTS = (2, 4, 5)  # an accumulator and a part; the result; both
HEAD_DIMS = (64, 80, 96, 128, 192, 256)
TARGETS = {"A100": 80, "H100": 90}


def main() -> int:
    """Compile, then interpret in a process of its own (Triton reads how it runs once); 1 if either fails."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    if importlib.util.find_spec("triton") is None:
        print("triton is not installed: nothing was checked")
        return 1
    if os.environ.get("TRITON_INTERPRET") == "1":
        return interpret()
    compile_all()
    again = [sys.executable, "-m", "tools.verify_merge"]
    return subprocess.run(again, env=os.environ | {"TRITON_INTERPRET": "1"}, check=False).returncode


def compile_all() -> None:
    """Translate the kernel for every target, head dimension and dtype; prints the widest accesses."""
    for name, capability in TARGETS.items():
        widths: dict[str, int] = {}
        variants = list(itertools.product(HEAD_DIMS, PART_DTYPES, PARTS, (False, True)))
        for head_dim, pointer, parts, add in variants:
            ptx = _compiled(capability, head_dim, pointer, parts, add).asm["ptx"]
            for access in re.findall(r"(?:ld|st)\.global\S*", ptx):
                widths[access] = widths.get(access, 0) + 1
        print(
            f"ok   {name}: {len(variants)} variants compiled; accesses {', '.join(sorted(widths))}",
            flush=True,
        )


def _compiled(capability: int, head_dim: int, pointer: str, parts: int, add: bool) -> Any:
    """Return what Triton makes of the kernel as `launch` would call it for dense tensors.

    Two parts are a float32 accumulator and a part, four are parts whose result is written, five also have an
    accumulator.
    """
    triton, backends = importlib.import_module("triton"), importlib.import_module("triton.backends.compiler")
    return triton.compile(
        source_of(head_dim, pointer, parts, add), target=backends.GPUTarget("cuda", capability, 32)
    )


def source_of(head_dim: int, pointer: str, parts: int, add: bool) -> Any:
    """Return the kernel as `launch` would call it for dense tensors, for Triton's compiler."""
    module: Any = importlib.import_module("ds_ring.cuda.merge")
    names = module.merge_rows.arg_names
    width = 1 << (head_dim - 1).bit_length()
    constants = {"HEAD_DIM": head_dim, "WIDTH": width, "ROWS": max(1, module.ELEMENTS // width)}
    constants |= {"PARTS": parts, "ADD": add, "DTYPE": importlib.import_module("triton.language").float32}
    # Strides of 1 are constants, multiples of 16 are known to be: so Triton's launcher does it as well.
    constants |= {f"{name}4": 1 for name in "oabcde"} | {f"{name}3": 1 for name in "lstuvw"}
    kinds = dict.fromkeys(("out", "lse", *(f"lse_{x}" for x in "abcde")), "*fp32")
    kinds |= {f"part_{x}": pointer for x in "abcde"}
    kinds |= {"out": pointer} if parts == 4 else {f"part_{'abcde'[parts - 1]}": "*fp32"}
    signature = {name: "constexpr" if name in constants else kinds.get(name, "i32") for name in names}
    even = {name for name in names if name in kinds or re.fullmatch("[oabcde][0-3]", name)}
    known = {(at,): [["tt.divisibility", 16]] for at, name in enumerate(names) if name in even}
    compiler = importlib.import_module("triton.compiler")
    return compiler.ASTSource(module.merge_rows, signature, constants, known)


def interpret() -> int:
    """Hold the interpreted kernel against float64, and count its bytes and those of torch's operators."""
    launch = importlib.import_module("ds_ring.cuda.merge").launch
    made = list(cases(HEAD_DIMS))
    found = [what for case in made for what in wrong(case, into_accumulator(launch))]
    found += [what for case in made[:: len(HEAD_DIMS)] for what in wrong_parts(case, launch)]
    print("\n".join(f"FAIL {what}" for what in found) or f"ok   {len(made)} cases as float64", flush=True)
    counted = {}
    for dtype in (torch.bfloat16, torch.float32):
        out, lse, part_lse = torch.randn(1, 2, 64, 128), torch.randn(1, 2, 64), torch.randn(1, 2, 64)
        operands = (out, lse, torch.randn(out.shape).to(dtype), part_lse)
        kernel, operators = (
            _bytes_of_kernel(into_accumulator(launch), operands),
            _bytes_of_operators(operands),
        )
        # Of the output alone: what rows of 128 share, the log-sum-exps, is 0.1 bytes an element more.
        counted[dtype] = round(kernel / out.numel())
        print(f"     part in {dtype}: {kernel / out.numel():.2f} bytes an element, torch's operators"
              f" {operators / out.numel():.2f}", flush=True)  # fmt: skip
    # Four parts of 16 bits, written in 16 bits.
    part = operands[2].bfloat16()
    parts = (torch.empty_like(part), lse, [(part, part_lse)] * 4)
    of_parts = _bytes_of_kernel(launch, parts) / out.numel()
    print(f"     four parts in bfloat16 and the result: {of_parts:.2f} bytes an element", flush=True)
    good = not found and round(of_parts) == 10 and counted == {torch.bfloat16: 10, torch.float32: 12}
    print("not checked: speed, anything on a real GPU")
    return 0 if good else 1


def _bytes_of_kernel(launch: Any, operands: tuple[Any, ...]) -> int:
    """Return the bytes that the interpreted kernel loads and stores."""
    interpreter = importlib.import_module("triton.runtime.interpreter")
    moved = 0

    def counting(name: str, mask_at: int) -> Any:
        real = getattr(interpreter.InterpreterBuilder, name)

        def access(builder: Any, pointers: Any, *arguments: Any) -> Any:
            nonlocal moved
            size = pointers.get_element_ty().primitive_bitwidth // 8
            moved += int(arguments[mask_at].data.sum()) * size
            return real(builder, pointers, *arguments)

        return mock.patch.object(interpreter.InterpreterBuilder, name, access)

    with counting("create_masked_load", 0), counting("create_masked_store", 1):
        launch(*operands)
    return moved


class _Moved(TorchDispatchMode):
    """Count the bytes that operators read and write, each as a kernel of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if not function.is_view:
            read = args[1:] if function.__name__.startswith("copy_") else args
            self.bytes += sum(x.nbytes for x in (*read, result) if isinstance(x, Tensor))
        return result


def _bytes_of_operators(operands: tuple[Tensor, ...]) -> int:
    with _Moved() as moved:
        merge_by_operators_(*operands)
    return moved.bytes


if __name__ == "__main__":
    sys.exit(main())
