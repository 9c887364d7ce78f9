"""Check the CUDA path on a machine without a GPU: interpret FlexAttention's kernels, or compile all kernels.

Inductor sees an H100 and lowers our calls to Triton, forward and backward; Triton's interpreter runs
these kernels on CPU memory, hop by hop around a ring of three, and the result is held against float64.
Checked: the lowering, the kernels' arithmetic in float32, masks and block tables, one compilation for all
hops, with the templates of torch 2.11 (which read the tables in another way) and of the installed one.
With --compile Triton's compiler and ptxas make cubins of these kernels in bfloat16, and of ours, for A100,
H100 and B200; what they need is printed as a table and held against a budget. Not checked: speed, races,
tensor cores, anything on a real GPU.

Needs the package triton in addition to torch's CPU wheel (`pip install "triton==3.7.1"` for torch 2.13):
    python -m tools.verify_cuda_kernels --patterns causal dilated
    python -m tools.verify_cuda_kernels --patterns causal --shapes
    python -m tools.verify_cuda_kernels --compile ours
    python -m tools.verify_cuda_kernels --compile --jobs 2 --output tools/results
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "0" if "--compile" in sys.argv else "1"  # read when triton is imported
sys.path.insert(0, str(Path(__file__).parent))  # by -m: the other tools
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"

import torch
from cuda_code import INSTALLED, OLDEST, TARGETS, flex_templates, lowered_for
from torch._dynamo.utils import counters

from ds_ring import Tree
from ds_ring.compat.torch_kernels import derives_joint_graph
from ds_ring.kernels.flex.kernel import FlexKernel
from ds_ring.masks.pattern import Pattern
from tests.cases import PATTERNS, layout_for, longnet
from tests.hops import ring_hops
from tests.reference import dense_attention, relative_error

BLOCK, LEAST_BLOCKS = 32, 5  # of a rank: kernels with few blocks a row hide wrong tables
TILES: dict[str, Any] = {"fwd_BLOCK_M": BLOCK, "fwd_BLOCK_N": BLOCK}
TILES |= {f"bwd_BLOCK_{axis}": BLOCK for axis in ("M1", "N1", "M2", "N2")}
LIMIT = 1e-6  # relative to the largest magnitude, float32
HEAD_DIM, RING = 16, 3
MASKS = PATTERNS | {
    "LongNet": lambda tokens: longnet(tokens, 64),
    "tree": lambda tokens: Tree((-1, 0, 0, 2, 2), (90, 110, 60, 130, 70), tokens),
}
CASES = {
    "causal": "zigzag", "full": "zigzag", "window": "contiguous", "documents, causal": "zigzag",
    "LongNet": "contiguous", "tree": "zigzag", "dilated": "residue",
}  # fmt: skip
# Batch, query heads and K/V heads of passes in one process, and whether the functions for them are new.
SHAPES = (((1, 4, 2), True), ((1, 2, 1), True), ((2, 4, 2), True), ((3, 4, 2), False))


def check(
    name: str, pattern: Pattern, layout_name: str, tokens: int, sources: list[str], backend: str,
    shape: tuple[int, int, int] = (1, 4, 2), new: bool = True,
) -> bool:  # fmt: skip
    """One pattern around the ring; prints what came out."""
    counters.clear()
    sources.clear()
    torch.manual_seed(0)
    batch, heads, kv_heads = shape
    q, k, v, grad = (torch.randn(batch, h, tokens, HEAD_DIM) for h in (heads, kv_heads, kv_heads, heads))
    layout = layout_for(layout_name, pattern, tokens=tokens, ring_size=RING)
    kernel = FlexKernel(BLOCK, backend, **TILES)
    gradients = derives_joint_graph()
    got = ring_hops(kernel, q, k, v, grad, pattern, layout, gradients)
    want = dense_attention(q, k, v, grad, pattern)
    sees = want.lse.isfinite()
    errors = {"out": relative_error(got.out, want.out), "lse": relative_error(got.lse[sees], want.lse[sees])}
    for label in ("dq", "dk", "dv") if gradients else ():
        errors[label] = relative_error(getattr(got, label), getattr(want, label))
    kernels = sum(text.count("async_compile.triton(") for text in sources)
    compilations = counters["stats"]["unique_graphs"]
    good = max(errors.values()) < LIMIT and torch.equal(got.lse.isfinite(), sees)
    good = good and compilations == new * (1 + gradients)
    figures = " ".join(f"{label} {error:.1e}" for label, error in errors.items())
    print(
        f"{'ok  ' if good else 'FAIL'} {name} ({layout_name}, batch and heads {shape}): {figures};"
        f" {compilations} graphs compiled, {kernels} Triton kernels, {RING} ranks",
        flush=True,
    )
    return good


def main() -> int:
    """Run the chosen patterns; 1 if one of them fails."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--patterns", nargs="*", choices=list(MASKS))
    parser.add_argument("--tokens", type=int, default=500)
    parser.add_argument("--templates", nargs="*", choices=(OLDEST, INSTALLED), default=[OLDEST, INSTALLED])
    parser.add_argument("--shapes", action="store_true", help="several numbers of heads and samples")
    parser.add_argument(
        "--compile", nargs="?", const="all", choices=("all", "ours"), help="cubins, and a table"
    )
    parser.add_argument("--targets", nargs="*", type=int, default=list(TARGETS), choices=list(TARGETS))
    parser.add_argument("--head-dims", nargs="*", type=int, default=[64, 80, 96, 128, 192, 256])
    parser.add_argument(
        "--options", type=json.loads, metavar="JSON", help="FlexAttention's, in place of ours"
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes that compile")
    parser.add_argument("--output", type=Path, help="a folder for the tables")
    arguments = parser.parse_args()
    if arguments.tokens <= RING * BLOCK * (LEAST_BLOCKS - 1):
        parser.error(
            f"--tokens: expected {LEAST_BLOCKS} blocks of {BLOCK} tokens on each of {RING} ranks or more"
        )
    if importlib.util.find_spec("triton") is None:
        print("triton is not installed: nothing was checked")
        return 1
    if arguments.compile:
        compiled_kernels = importlib.import_module("compiled_kernels")
        names = [name for name in arguments.patterns or PATTERNS if name in PATTERNS]
        where = (arguments.targets, arguments.head_dims, names)
        how = (arguments.jobs, arguments.output, arguments.options)
        return int(compiled_kernels.run(arguments.compile, *where, *how))
    way = "gradients by the backward operator" if derives_joint_graph() else "WITHOUT gradients"
    print(f"torch {torch.__version__}: Triton kernels interpreted on the CPU, {way}", flush=True)
    if not derives_joint_graph():
        print("this torch differentiates a recomputed hop, and autograd's engine asks for a real device")
    shapes, good = SHAPES if arguments.shapes else SHAPES[:1], []
    sources: list[str] = []
    with lowered_for(TARGETS[90], sources, run=True) as backend:
        for templates, name in itertools.product(arguments.templates, arguments.patterns or list(CASES)):
            torch._dynamo.reset()
            pattern, layout_name = MASKS[name](arguments.tokens), CASES.get(name, "zigzag")
            with flex_templates(templates):
                for shape, new in shapes:
                    print(f"templates of torch {templates}: ", end="")
                    row = (name, pattern, layout_name, arguments.tokens, sources, backend, shape, new)
                    good.append(check(*row))
    print("not checked: Triton's compiler, bf16 and fp16, speed, anything on a real GPU")
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
