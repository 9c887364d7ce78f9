"""Compile the Triton kernels of the CUDA path to cubins and compare ptxas's report with a budget.

Owns which kernels there are, the budget and the table; `verify_cuda_kernels.py --compile` is the command.
Ours are compiled for each head dimension and dtype. Those that Inductor makes of flex come from passes over a
ring of three in one process: all patterns, several numbers of heads, two lengths.
"""

from __future__ import annotations

import importlib
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import datetime, timezone
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
from cuda_code import TARGETS, Resources, compiled, compiled_inductor, lowered_for, triton_sources
from torch._dynamo.utils import counters

from ds_ring.kernels.flex import kernel as flex
from ds_ring.kernels.flex.options import choose_blocks
from tests.cases import PATTERNS, Shape, layout_for, tensors
from tests.hops import ring_hops

PART_DTYPES = ("*bf16", "*fp16", "*fp32")
PARTS = (2, 4, 5)  # a float32 accumulator and a part; parts and their result; five parts with an accumulator
RING, LENGTHS, BLOCK = 3, (1100, 1500), flex.BLOCK
HEADS = ((32, 8), (8, 8))  # queries' and keys'; the second pair is lowered for TWO_HEADS, and not compiled
TWO_HEADS = (64, 128)
SPILLED = 64  # bytes of a thread, stored or loaded, that a kernel may spill
# More for those that spill with every block, number of warps and stages that was tried, and for those that an
# H200 has timed: with these blocks they are up to twice as fast as with any that do not spill.
MORE = {(100, 192, "backward"): 128, (100, 256, "backward"): 128}
MORE |= {(90, dim, "backward"): 800 for dim in (64, 80, 96, 128)} | {(90, 64, "forward"): 320}
MORE |= {(90, dim, "forward"): 96 for dim in (192, 256)}  # by triton 3.8; 56 by 3.7.1
OURS = ("merge_rows",)  # every function in ds_ring that `triton.jit` decorates and a launch names


class Row(NamedTuple):
    """Hold the worst of the kernels of one kind for a GPU (compute capability) and head dimension."""

    capability: int
    head_dim: int
    kernel: str
    blocks: str
    kernels: int
    worst: Resources


def faults(rows: Iterable[Row]) -> list[str]:
    """Return which rows are over the budget, in words."""
    texts = []
    for row in rows:
        name = f"sm_{row.capability}, head_dim {row.head_dim}, {row.kernel} ({row.blocks})"
        allowed = MORE.get((row.capability, row.head_dim, row.kernel), SPILLED)
        if row.worst.spilled_bytes > allowed:
            texts.append(f"{name}: expected at most {allowed} bytes spilled, got {row.worst.spilled_bytes}")
        room = TARGETS[row.capability].shared_bytes
        if row.worst.shared_bytes > room:
            texts.append(
                f"{name}: expected at most {room} bytes of shared memory, got {row.worst.shared_bytes}"
            )
    return texts


def find_worst(resources: Sequence[Resources]) -> Resources:
    """Return the largest of each figure."""
    return Resources(*(max(column) for column in zip(*resources, strict=True)))


def ours(capability: int, head_dims: Iterable[int]) -> Iterator[Row]:
    """Compile our own kernels."""
    for head_dim in head_dims:
        resources = [
            compiled(merge_source(head_dim, *variant), capability, {})
            for variant in itertools.product(PART_DTYPES, PARTS, (False, True))
        ]
        yield Row(capability, head_dim, OURS[0], "", len(resources), find_worst(resources))


def merge_source(head_dim: int, pointer: str, parts: int, add: bool) -> Any:
    """Return the merge kernel as `launch` would call it for dense tensors, for Triton's compiler."""
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


class Captured(NamedTuple):
    """Hold one kernel of Inductor's: of which head dimension, its name there and its source."""

    head_dim: int
    name: str
    text: str

    @property
    def kernel(self) -> str:
        """Return the pass that it is part of, or "row sums"."""
        if "tem_fused" not in self.name:
            return "row sums"  # of grad_out * out, before the backward kernel
        return "backward" if "backward" in self.name else "forward"

    @property
    def blocks(self) -> str:
        """Return blocks, stages and warps."""
        if self.kernel == "row sums":
            return ""
        sizes = dict(re.findall(r"\b(BLOCK_[MN][12]?) : tl.constexpr = (\d+)", self.text))
        sides = [sizes[name] for name in sorted(sizes, key=lambda name: (name[7:], name))]
        stages, warps = (re.search(rf"num_{what}=(\d+),", self.text) for what in ("stages", "warps"))
        assert sides and stages and warps, self.name
        return f"{' x '.join(sides)}, {stages[1]} stages, {warps[1]} warps"


def captured(
    capability: int, head_dims: Sequence[int], names: Sequence[str], options: dict[str, Any] | None = None
) -> set[Captured]:
    """Return the distinct kernels that Inductor makes for a GPU, in bfloat16.

    Args:
        capability: of the GPU.
        head_dims: of queries and values.
        names: of patterns.
        options: FlexAttention's, in place of ours.

    Raises:
        AssertionError: a function was compiled again for another length, rank, hop or pattern.
    """
    kernels: set[Captured] = set()
    counters.clear()
    sources: list[str] = []
    with lowered_for(TARGETS[capability], sources, run=False) as backend:
        for head_dim in head_dims:
            blocks: dict[str, Any] = (
                choose_blocks(capability, head_dim, BLOCK) if options is None else options
            )
            kernel = flex.FlexKernel(BLOCK, backend, **blocks)
            for name in names:
                for pair in HEADS if head_dim in TWO_HEADS else HEADS[:1]:
                    begin, (heads, kv_heads) = len(sources), pair
                    for tokens in LENGTHS:
                        inputs = tensors(Shape(1, heads, kv_heads, tokens, head_dim), torch.bfloat16)
                        pattern = PATTERNS[name](tokens)
                        layout = layout_for("zigzag", pattern, tokens=tokens, ring_size=RING)
                        ring_hops(kernel, *inputs, pattern, layout)
                    named = [item for module in sources[begin:] for item in triton_sources(module).items()]
                    kernels |= {Captured(head_dim, *item) for item in named if pair == HEADS[0]}
        functions = sum(key[0] == backend for key in flex._compiled_calls)
    compilations = counters["stats"]["unique_graphs"]
    assert functions == compilations, f"{functions} functions of flex were compiled {compilations} times"
    return kernels


def inductors(capability: int, kernels: Iterable[Captured], jobs: int) -> list[Row]:
    """Compile Inductor's kernels in several processes."""
    ordered = sorted(kernels)
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        work = [pool.submit(compiled_inductor, item.name, item.text, capability) for item in ordered]
        done = [item.result() for item in work]
    cells: dict[tuple[int, str, str], list[list[Resources]]] = {}
    for item, resources in zip(ordered, done, strict=True):
        cells.setdefault((item.head_dim, item.kernel, item.blocks), []).append(resources)
    return [
        Row(capability, *cell, len(several), find_worst([item for results in several for item in results]))
        for cell, several in cells.items()
    ]


def table(rows: Iterable[Row], command: str) -> str:
    """Return the rows as Markdown."""
    triton: Any = importlib.import_module("triton")
    day = datetime.now(timezone.utc).strftime("%-d %B %Y")
    lines = [
        "# What ptxas says of the CUDA path's kernels", "",
        f"`{command}`, torch {torch.__version__.partition('+')[0]}, triton {triton.__version__}, {day},"
        " without a GPU. Figures are the largest of all kernels of a row; bytes are of a thread (spilled) and"
        " of a block (shared).", "",
        "| GPU | head_dim | kernel | blocks | registers | spilled: stored, loaded | shared | kernels |",
        "|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for row in rows:
        worst = row.worst
        lines.append(
            f"| sm_{row.capability} | {row.head_dim} | {row.kernel} | {row.blocks} | {worst.registers} |"
            f" {worst.stored_bytes}, {worst.loaded_bytes} | {worst.shared_bytes} | {row.kernels} |"
        )
    return "\n".join(lines) + "\n"


def run(
    which: str, capabilities: Sequence[int], head_dims: Sequence[int], names: Sequence[str], jobs: int,
    output: Path | None, options: dict[str, Any] | None,
) -> int:  # fmt: skip
    """Compile, print and write a table for each GPU; 1 if a kernel is over the budget."""
    rows: list[Row] = []
    for capability in capabilities:
        new = list(ours(capability, head_dims))
        if which == "all":
            new += inductors(capability, captured(capability, head_dims, names, options), jobs)
        command = f"python -m tools.verify_cuda_kernels --compile {which} --targets {capability}"
        text = table(new, command)
        print(text, end="", flush=True)
        if output is not None:
            (output / f"compiled_sm_{capability}.md").write_text(text)
        rows += new
    wrong = faults(rows)
    print("\n".join(f"FAIL {fault}" for fault in wrong) or f"ok   {len(rows)} rows within the budget")
    return 1 if wrong else 0
