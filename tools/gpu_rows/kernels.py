"""What runs here, and how exact and how fast it is: versions, references in float64, kernels."""

from __future__ import annotations

import ctypes
import logging
import math
import os
import statistics
from collections.abc import Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from benchmarks.gpu_rates import (
    ProductionPass,
    Shape,
    repeat,
    sdpa,
    seconds,
    significant,
    tile_kinds,
)
from benchmarks.measuring import ResultRow
from common import in_turns, read_version
from torch import Tensor

from ds_ring import Causal, Full, build_plan, make_layout
from ds_ring.errors import RingError
from ds_ring.kernels.flash.kernel import FlashKernel
from ds_ring.kernels.flash.packages import IMPLEMENTATIONS
from ds_ring.kernels.flex.kernel import FlexKernel
from ds_ring.kernels.select import Kernel, get_kernel
from ds_ring.masks.tiles import Tiles
from tests.cases import layout_for
from tests.hops import ring_hops
from tests.reference import Dense, dense_attention, relative_error

FOLDER = "GPU_FIRST_FOLDER"  # of references, which all processes read
PACKAGES = (
    "torch", "triton", "deepspeed", "transformers", "flash-attn", "flash-attn-3", "flash-attn-4",
)  # fmt: skip


def is_cuda(device: str) -> bool:
    """Return whether a row runs on a GPU, or tries the code on the CPU."""
    return device == "cuda"


def get_shape(device: str) -> Shape:
    """Return heads, head dimension and dtype of all rows."""
    return (
        Shape(32, 8, 128, torch.bfloat16, "cuda")
        if is_cuda(device)
        else Shape(4, 2, 16, torch.float32, "cpu")
    )


def exact_tokens(device: str) -> int:
    """Return the tokens of the references: six blocks of flex on each of four ranks."""
    return 3072 if is_cuda(device) else 128


def get_limit(dtype: torch.dtype) -> float:
    """Return the error, relative to the largest value, that is still exact."""
    return 2e-2 if dtype.itemsize == 2 else 1e-5


@cache
def operands(device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return q, k, v and the gradient of out, the same in every process."""
    shape, draw = get_shape(device), torch.Generator().manual_seed(0)
    sizes = [(1, n, exact_tokens(device), shape.head_dim) for n in (shape.heads, shape.kv_heads)]
    q, grad, k, v = (torch.randn(sizes[i], generator=draw).to(device, shape.dtype) for i in (0, 0, 1, 1))
    return q, k, v, grad


@cache
def reference(device: str, mask: str) -> Dense:
    """Return attention in float64, which one process computes on the device for all rows."""
    path = Path(os.environ[FOLDER], f"{mask}.pt")
    if not path.is_file():
        exact_results = dense_attention(*operands(device), tile_kinds(exact_tokens(device))[mask])
        temporary = path.with_suffix(f".{os.getpid()}")  # ranks may compute it at the same time
        torch.save(tuple(x.float() for x in exact_results), temporary)
        temporary.replace(path)
    return Dense(*torch.load(path, map_location=device))


def compute_errors(got: Mapping[str, Tensor], want: Dense, lse_more: float = 0.0) -> dict[str, float]:
    """Return the errors of out, lse and the gradients, relative to the largest value."""
    wanted = want._replace(lse=want.lse + lse_more)._asdict()
    sees = wanted["lse"].isfinite()
    errors = {name: relative_error(x, wanted[name]) for name, x in got.items() if name != "lse"}
    if not torch.equal(got["lse"].isfinite(), sees):
        return errors | {"lse": math.inf}
    return errors | {"lse": relative_error(got["lse"][sees], wanted["lse"][sees])}


def judged(
    case: Mapping[str, Any], errors: Mapping[str, float], limit: float, facts: Mapping[str, Any] | None = None
) -> ResultRow:
    """Return the row of some errors, which is wrong if one is not below the limit."""
    wrong = "" if all(error < limit for error in errors.values()) else f"expected errors below {limit:g}"
    return ResultRow(
        case, {name: f"{error:.1e}" for name, error in errors.items()} | dict(facts or {}), wrong
    )


def nccl_version() -> tuple[int, ...]:
    """Return the version of the NCCL that computes: a preloaded one, or the one torch was built with."""
    number = ctypes.c_int()
    try:
        ctypes.CDLL(None).ncclGetVersion(ctypes.byref(number))
    except AttributeError:  # torch tells what it was built with, whatever is preloaded
        version: tuple[int, ...] = torch.cuda.nccl.version()
        return version
    return number.value // 10_000, number.value // 100 % 100, number.value % 100


def packages(device: str) -> Iterator[ResultRow]:
    """Yield versions, and the GPU."""
    versions: dict[str, Any] = {name: read_version(name) for name in PACKAGES}
    if is_cuda(device):
        card = torch.cuda.get_device_properties(0)
        nccl = ".".join(map(str, nccl_version()))
        versions |= {"cuda": torch.version.cuda, "nccl": nccl, "gpu": card.name}
        versions |= {"cudnn": torch.backends.cudnn.version(), "multiprocessors": card.multi_processor_count}
        versions["memory_gib"] = round(card.total_memory / 2**30, 1)
    yield ResultRow({}, versions)


def ceilings(device: str) -> Iterator[ResultRow]:
    """Yield what memory and matrix units reach here, by torch."""
    shape, size = get_shape(device), 8192 if is_cuda(device) else 256
    a, b = (torch.randn(size, size, device=device, dtype=shape.dtype) for _ in range(2))
    source = torch.randn(size * size, device=device)
    into = torch.empty_like(source)
    works = {"copy": lambda: into.copy_(source), "matmul": lambda: a @ b}
    taken = in_turns({name: partial(seconds, work, device) for name, work in works.items()}, 10, 3)
    copy, product = (statistics.median(taken[name]) for name in works)
    results = {"copy_gb_per_s": significant(2 * source.nbytes / copy / 1e9)}
    yield ResultRow({}, results | {"matmul_tflops": significant(2 * size**3 / product / 1e12)})


class _Lines(logging.Handler):
    """Keep what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a message."""
        self.found.append(record.getMessage().removeprefix('ds_ring: kernel "flash"').strip(": "))


def implementation(device: str, head_dim: int, value_dim: int) -> Iterator[ResultRow]:
    """Yield which implementation "flash" takes for head dimensions, and why not another one."""
    lines, log, dtype = _Lines(), logging.getLogger("ds_ring.kernels.flash.kernel"), get_shape(device).dtype
    log.addHandler(lines)
    log.setLevel(logging.INFO)
    q, k = (torch.randn(1, heads, 128, head_dim, device=device, dtype=dtype) for heads in (2, 1))
    for _ in FlashKernel().forward(q, k, k[..., :value_dim], _square(128), head_dim**-0.5):
        pass
    yield ResultRow(
        {"head_dims": f"{head_dim}, {value_dim}"}, {"log": "; ".join(lines.found) or "aten's for the CPU"}
    )


def _square(tokens: int) -> Tiles:
    layout = make_layout("contiguous", tokens=tokens, ring_size=1, pattern=Full())
    plan = build_plan(Full(), layout, query_heads=1, kv_heads=1)
    return plan.rank(0).classes[0].hops[0].tiles


def make_references(device: str) -> Iterator[ResultRow]:
    """Compute the float64 references, once for all rows."""
    for mask in tile_kinds(exact_tokens(device)):
        taken = seconds(partial(reference, device, mask), device)
        yield ResultRow({"mask": mask, "tokens": exact_tokens(device)}, {"s": round(taken, 2)})


def make_kernel(name: str, device: str) -> Kernel:
    """Return a kernel by the name of its implementation."""
    if name in IMPLEMENTATIONS:
        return FlashKernel(name)
    if name == "flex FLASH":
        return FlexKernel(BACKEND="FLASH")
    return FlexKernel() if name == "flex" else get_kernel(name, device)


def is_missing(error: RingError) -> bool:
    """Return whether an implementation is refused because its package is not installed."""
    return "ModuleNotFoundError" in str(error) or "flash attention cannot be used" in str(error)


def exact(device: str, kernel: str) -> Iterator[ResultRow]:
    """Yield the errors of a kernel for each mask, in a ring of four virtual ranks."""
    instance = make_kernel(kernel, device)
    for mask, pattern in tile_kinds(exact_tokens(device)).items():
        layout = layout_for("zigzag", pattern, tokens=exact_tokens(device), ring_size=4)
        try:
            got = ring_hops(instance, *operands(device), pattern, layout)
        except RingError as error:
            if not is_missing(error):
                raise
            yield ResultRow({"kernel": kernel}, {"not_shown": "its package is not installed"})
            return
        yield judged(
            {"kernel": kernel, "mask": mask},
            compute_errors(got._asdict(), reference(device, mask)),
            get_limit(get_shape(device).dtype),
        )


def timed(device: str, kernel: str) -> Iterator[ResultRow]:
    """Yield ten timed production passes of one rank, causal, and torch's own attention in the same turns."""
    shape, instance = get_shape(device), make_kernel(kernel, device)
    tokens = 16_384 if is_cuda(device) else 256
    works = dict(zip(("torch forward", "torch backward"), sdpa(shape, tokens, True), strict=True))
    try:
        rank = ProductionPass(shape, instance, Causal(), tokens)
        works |= {"forward": rank.forward, "backward": rank.backward}
        count = repeat(list, device)[1]
        works = {name: repeat(work, device)[0] for name, work in works.items()}
        taken = in_turns({name: partial(seconds, work, device) for name, work in works.items()}, 10, 2)
    except RingError as error:
        if not is_missing(error):
            raise
        yield ResultRow({"kernel": kernel}, {"not_shown": "its package is not installed"})
        return
    results: dict[str, Any] = {}
    for name, times in taken.items():
        times = [time / count for time in times]
        rate = shape.flops(rank.pairs, "backward" in name) / statistics.median(times) / 1e12
        results[f"{name}_ms"] = (
            f"{1e3 * statistics.median(times):.3f} ({1e3 * min(times):.3f}-{1e3 * max(times):.3f})"
        )
        results[f"{name}_tflops"] = significant(rate)
    yield ResultRow({"kernel": kernel, "tokens": tokens}, results)
