"""Check the FlexAttention kernel's CUDA path on a machine without a GPU.

Inductor is told of an H100 and lowers our calls to Triton, forward and backward; Triton's interpreter runs
these kernels on CPU memory, hop by hop around a ring of three, and the result is held against float64.
Checked: the lowering, the kernels' arithmetic in float32, masks and block tables, one compilation for all
hops. Not checked: that Triton's compiler accepts the kernels, speed, shared memory, races, tensor cores, bf16
and fp16.

Needs the CUDA wheel of torch (5 GB) in an environment of its own, with numpy, pydantic, pyyaml, psutil, tqdm:
    python -m tools.verify_cuda_kernels --patterns causal dilated
    python -m tools.verify_cuda_kernels --patterns causal --shapes
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"

import torch
import torch._inductor.scheduler
from torch._dynamo import device_interface
from torch._dynamo.utils import counters
from torch._inductor import compile_fx, config, graph
from torch._inductor.fx_passes import joint_graph, post_grad
from torch._inductor.runtime import triton_helpers

from ds_ring.masks.pattern import Pattern
from ds_ring.runtime.kernels.flex import FlexKernel, operator_compiles
from tests.cases import PATTERNS, layout_for
from tests.hops import ring_hops
from tests.reference import dense_attention, relative_error

BLOCK = 64
TILES: dict[str, Any] = {"fwd_BLOCK_M": BLOCK, "fwd_BLOCK_N": BLOCK}
TILES |= {f"bwd_BLOCK_{axis}": BLOCK for axis in ("M1", "N1", "M2", "N2")}
LIMIT = 2e-6  # relative to the largest magnitude, float32
HEAD_DIM, RING = 16, 3
# Batch, query heads and K/V heads of passes in one process, and whether the functions for them are new.
SHAPES = (((1, 4, 2), True), ((1, 2, 1), True), ((2, 4, 2), True), ((3, 4, 2), False))

H100 = types.SimpleNamespace(
    name="NVIDIA H100", major=9, minor=0, multi_processor_count=132, warp_size=32, total_memory=80 << 30,
    regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, max_threads_per_block=1024,
    shared_memory_per_block_optin=232448, shared_memory_per_multiprocessor=233472, L2_cache_size=50 << 20,
)  # fmt: skip
CUDA: dict[str, Callable[..., Any]] = {
    "is_available": lambda: True,
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "get_device_properties": lambda device=None: H100,
    "get_device_capability": lambda device=None: (9, 0),
    "is_bf16_supported": lambda *args, **kwargs: True,
    "synchronize": lambda *args: None,
    "get_rng_state": lambda *args: torch.zeros(1),
    "set_rng_state": lambda *args: None,
    "current_stream": lambda *args: None,
    "get_arch_list": lambda: ["sm_90"],
    "_lazy_init": lambda: None,
    "_exchange_device": lambda index: 0,
    "_maybe_exchange_device": lambda index: 0,
}


# What Inductor asks of Triton's driver.
DRIVER = types.SimpleNamespace(
    utils=types.SimpleNamespace(
        get_device_properties=lambda device: {"max_shared_mem": 232448, "multiprocessor_count": 132}
    ),
    get_current_target=lambda: importlib.import_module("triton.backends.compiler").GPUTarget("cuda", 90, 32),
    get_current_device=lambda: 0,
    get_current_stream=lambda device=None: 0,
    get_active_torch_device=lambda: torch.device("cpu"),
)


@contextmanager
def an_h100() -> Iterator[None]:
    """Inductor believes that there is one; its patterns, traced on the device, are left out."""
    with ExitStack() as stack:
        interface = device_interface.CudaInterface
        for name, function in CUDA.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, function))
            if name in vars(interface):
                stack.enter_context(mock.patch.object(interface, name, staticmethod(function)))
        for module in (joint_graph, post_grad):
            stack.enter_context(mock.patch.object(module, "lazy_init"))
        fake_tensor = torch._subclasses.fake_tensor
        stack.enter_context(mock.patch.object(fake_tensor, "init_gpu_context"))
        scheduler = torch._inductor.scheduler
        stack.enter_context(mock.patch.object(scheduler, "has_triton", return_value=True))
        yield


def on_cuda(fake: Any) -> Any:
    """A fake tensor like this one that says it is on the GPU."""
    if not isinstance(fake, torch.Tensor):
        return fake
    with fake.fake_mode:  # type: ignore[attr-defined]
        return torch.empty_strided(
            fake.shape, fake.stride(), dtype=fake.dtype, device="cuda:0", requires_grad=fake.requires_grad
        )


def lower(module: torch.fx.GraphModule, inputs: list[Any]) -> Any:
    """A backend of torch.compile: Inductor for CUDA, its code changed to allocate on the CPU."""
    inputs = [node.meta["example_value"] for node in module.graph.find_nodes(op="placeholder")]
    with an_h100():
        return compile_fx.compile_fx(module, [on_cuda(x) for x in inputs])


def prepare(sources: list[str]) -> None:
    """Patch what stays patched, and register the backend; generated modules are added to `sources`."""
    triton = importlib.import_module("triton")  # not there with the CPU wheel
    if not hasattr(triton.runtime.driver, "set_active"):
        raise SystemExit(f"triton {triton.__version__} has no driver.set_active")
    triton.runtime.driver.set_active(DRIVER)
    triton_helpers.set_driver_to_gpu = lambda: None
    config.fx_graph_cache = False
    config.compile_threads = 1
    codegen = graph.GraphLowering.codegen

    def on_cpu_memory(self: Any) -> Any:
        result = codegen(self)
        text = result[0].value
        for old, new in (
            ("_C._dynamo.guards._empty_strided_cuda", "_C._dynamo.guards._empty_strided_cpu"),
            ("with torch.cuda._DeviceGuard(0):", "if True:"),
            ("torch.cuda.set_device(0)", "pass"),
            ("get_raw_stream(0)", "0"),
        ):
            text = text.replace(old, new)
        result[0].value = text
        sources.append(text)
        return result

    graph.GraphLowering.codegen = on_cpu_memory  # type: ignore[method-assign]
    torch._dynamo.register_backend(lower, "interpreted_cuda")


def check(
    name: str, pattern: Pattern, layout_name: str, tokens: int, sources: list[str],
    shape: tuple[int, int, int] = (1, 4, 2), new: bool = True,
) -> bool:  # fmt: skip
    """One pattern around the ring; prints what came out."""
    counters.clear()
    sources.clear()
    torch.manual_seed(0)
    batch, heads, kv_heads = shape
    q, k, v, grad = (torch.randn(batch, h, tokens, HEAD_DIM) for h in (heads, kv_heads, kv_heads, heads))
    layout = layout_for(layout_name, pattern, tokens=tokens, ring_size=RING)
    kernel = FlexKernel(BLOCK, "interpreted_cuda", **TILES)
    gradients = operator_compiles()
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
    """Run the patterns that were asked for; 1 if one of them fails."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cases = {"causal": "zigzag", "dilated": "residue", "window": "contiguous", "documents, causal": "zigzag"}
    parser.add_argument("--patterns", nargs="*", default=list(cases), choices=list(PATTERNS))
    parser.add_argument("--tokens", type=int, default=450)
    parser.add_argument("--shapes", action="store_true", help="several numbers of heads and samples")
    arguments = parser.parse_args()
    if torch.version.cuda is None:
        print(f"torch {torch.__version__} is not a CUDA build: nothing was checked")
        return 1
    sources: list[str] = []
    prepare(sources)
    way = "gradients by the backward operator" if operator_compiles() else "WITHOUT gradients"
    print(f"torch {torch.__version__}: Triton kernels interpreted on the CPU, {way}", flush=True)
    if not operator_compiles():
        print("this torch differentiates a recomputed hop, and autograd's engine asks for a real device")
    shapes, good = SHAPES if arguments.shapes else SHAPES[:1], []
    for name in arguments.patterns:
        torch._dynamo.reset()
        pattern, layout_name = PATTERNS[name](arguments.tokens), cases.get(name, "zigzag")
        for shape, new in shapes:
            good.append(check(name, pattern, layout_name, arguments.tokens, sources, shape, new))
    print("not checked: Triton's compiler, bf16 and fp16, speed, anything on a real GPU")
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
