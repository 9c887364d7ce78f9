"""Generate and compile the CUDA code of FlexAttention calls without a GPU, with torch's CPU wheel.

Owns the pretence of a GPU while Inductor lowers a graph, the Triton kernels in what it wrote, and their
compilation by Triton and ptxas. Needs the package triton (`pip install "triton==3.7.1"` for torch 2.13).
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import io
import itertools
import re
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch._inductor.scheduler
from torch._dynamo import device_interface
from torch._inductor import compile_fx, config, graph
from torch._inductor.fx_passes import joint_graph, post_grad
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.hints import DeviceProperties

from tests.fake_cuda import cuda_guard


class Target(NamedTuple):
    """Describe a GPU: multiprocessors, and the shared memory that one block may have, in bytes."""

    name: str
    capability: int
    multiprocessors: int
    shared_bytes: int

    @property
    def version(self) -> tuple[int, int]:
        """Return the compute capability as (major, minor)."""
        return divmod(self.capability, 10)


TARGETS = {
    80: Target("A100", 80, 108, 166_912),
    90: Target("H100", 90, 132, 232_448),
    100: Target("B200", 100, 148, 232_448),
}
_backends = itertools.count()
ON_CPU_MEMORY = (
    ("_C._dynamo.guards._empty_strided_cuda", "_C._dynamo.guards._empty_strided_cpu"),
    ("from torch._C import _cuda_getCurrentRawStream as get_raw_stream", ""),
    ("with torch.cuda._DeviceGuard(0):", "if True:"),
    ("torch.cuda.set_device(0)", "pass"),
    ("get_raw_stream(0)", "0"),
)
# In place of a kernel where nothing is computed; outputs are allocated and stay as they are.
NO_KERNEL = "(lambda *_, **__: __import__('types').SimpleNamespace(run=lambda *_, **__: None))("


@contextmanager
def pretended(target: Target) -> Iterator[None]:
    """Let Inductor believe in a GPU; its patterns, traced on the device, are left out."""
    properties = types.SimpleNamespace(
        name=target.name, major=target.version[0], minor=target.version[1], warp_size=32,
        total_memory=80 << 30, L2_cache_size=50 << 20, multi_processor_count=target.multiprocessors,
        regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, max_threads_per_block=1024,
        shared_memory_per_block_optin=target.shared_bytes,
        shared_memory_per_multiprocessor=target.shared_bytes,
    )  # fmt: skip
    cuda: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: target.version,
        "is_bf16_supported": lambda *args, **kwargs: True,
        "synchronize": lambda *args: None,
        "get_rng_state": lambda *args: torch.zeros(1),
        "set_rng_state": lambda *args: None,
        "current_stream": lambda *args: None,
        "get_arch_list": lambda: [f"sm_{target.capability}"],
        "_lazy_init": lambda: None,
        "_exchange_device": lambda index: 0,
        "_maybe_exchange_device": lambda index: 0,
    }
    DeviceProperties.create.cache_clear()
    with ExitStack() as stack:
        stack.enter_context(cuda_guard())
        interface = device_interface.CudaInterface
        for name, function in cuda.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, function))
            if name in vars(interface):
                stack.enter_context(mock.patch.object(interface, name, staticmethod(function)))
        for module in (joint_graph, post_grad):
            stack.enter_context(mock.patch.object(module, "lazy_init"))
        fake_tensor = torch._subclasses.fake_tensor
        stack.enter_context(mock.patch.object(fake_tensor, "init_gpu_context"))
        scheduler = torch._inductor.scheduler
        stack.enter_context(mock.patch.object(scheduler, "has_triton", return_value=True))
        stack.enter_context(mock.patch.object(torch.version, "cuda", torch.version.cuda or "13.0"))
        yield


def set_driver(target: Target) -> None:
    """Give Triton a driver, which answers what Inductor asks of one."""
    triton = importlib.import_module("triton")
    if not hasattr(triton.runtime.driver, "set_active"):
        raise SystemExit(f"triton {triton.__version__} has no driver.set_active")
    compiler = importlib.import_module("triton.backends.compiler")
    sizes = {"max_shared_mem": target.shared_bytes, "multiprocessor_count": target.multiprocessors}
    driver = types.SimpleNamespace(
        utils=types.SimpleNamespace(get_device_properties=lambda device: sizes),
        get_current_target=lambda: compiler.GPUTarget("cuda", target.capability, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device=None: 0,
        get_active_torch_device=lambda: torch.device("cpu"),
    )
    triton.runtime.driver.set_active(driver)
    triton_helpers.set_driver_to_gpu = lambda: None


def _on_cuda(fake: Any) -> Any:
    """Return a fake tensor like this one whose device is the GPU."""
    if not isinstance(fake, torch.Tensor):
        return fake
    with fake.fake_mode:  # type: ignore[attr-defined]
        return torch.empty_strided(
            fake.shape, fake.stride(), dtype=fake.dtype, device="cuda:0", requires_grad=fake.requires_grad
        )


@contextmanager
def lowered_for(target: Target, sources: list[str], run: bool) -> Iterator[str]:
    """Yield the name of a backend of torch.compile: Inductor for a GPU, its code changed to use CPU memory.

    Args:
        target: the GPU.
        sources: generated modules are added to it.
        run: execute the kernels, which must be interpreted; otherwise outputs hold old contents of memory.
    """

    def backend(module: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        inputs = [node.meta["example_value"] for node in module.graph.find_nodes(op="placeholder")]
        with pretended(target):
            return compile_fx.compile_fx(module, [_on_cuda(x) for x in inputs])

    codegen = graph.GraphLowering.codegen

    def on_cpu_memory(self: Any) -> Any:
        result = codegen(self)
        sources.append(result[0].value)
        changes = ON_CPU_MEMORY if run else (*ON_CPU_MEMORY, ("async_compile.triton(", NO_KERNEL))
        for old, new in changes:
            result[0].value = result[0].value.replace(old, new)
        return result

    set_driver(target)
    name = f"sm_{target.capability}_without_gpu_{next(_backends)}"
    torch._dynamo.register_backend(backend, name)
    with (
        config.patch(fx_graph_cache=False, compile_threads=1),
        mock.patch.object(graph.GraphLowering, "codegen", on_cpu_memory),
    ):
        yield name


OLDEST, INSTALLED = "2.11", "installed"
_TEMPLATES = {
    "flex_attention_template": ("flex_attention", "utilities", "common"),
    "flex_attention_backward_template": ("flex_backwards", "utilities"),
}


@contextmanager
def flex_templates(version: str) -> Iterator[None]:
    """Let Inductor write FlexAttention's kernels as torch 2.11 does, or as the installed one.

    They differ in one thing that matters here: torch before 2.12.1 indexes the tables of full blocks with the
    strides of the partial ones. Nothing else is put back.
    """
    lowering = importlib.import_module("torch._inductor.kernel.flex.flex_attention")
    with ExitStack() as stack:
        for name, parts in _TEMPLATES.items() if version == OLDEST else ():
            template = getattr(lowering, name)
            text = "".join(map(lowering.load_flex_template, parts)).replace('stride("FULL_', 'stride("')
            stack.enter_context(mock.patch.object(template, "template", template._template_from_string(text)))
        yield


def triton_sources(module: str) -> dict[str, str]:
    """Return the Triton kernels of a generated module, by name."""
    sources = {}
    for node in ast.walk(ast.parse(module)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "async_compile.triton":
            name, text = (ast.literal_eval(argument) for argument in node.args[:2])
            sources[name] = text
    return sources


class Resources(NamedTuple):
    """Hold ptxas's report on a kernel: registers and spilled bytes of a thread, shared bytes of a block."""

    registers: int
    stored_bytes: int
    loaded_bytes: int
    shared_bytes: int

    @property
    def spilled_bytes(self) -> int:
        """Return the larger one of the bytes stored to and loaded from local memory."""
        return max(self.stored_bytes, self.loaded_bytes)


def compiled(source: Any, capability: int, options: dict[str, Any]) -> Resources:
    """Compile a Triton kernel (an ASTSource) to a cubin; raises what Triton's compiler raises."""
    triton, backends = importlib.import_module("triton"), importlib.import_module("triton.backends.compiler")
    printed = io.StringIO()
    knobs = triton.knobs
    with knobs.compilation.scope(), knobs.nvidia.scope(), redirect_stdout(printed):
        knobs.compilation.always_compile, knobs.nvidia.dump_ptxas_log = True, True
        target = backends.GPUTarget("cuda", capability, 32)
        kernel = triton.compile(source, target=target, options=options)
    (stored,), (loaded,), (registers,) = (
        re.findall(pattern, printed.getvalue())
        for pattern in (r"(\d+) bytes spill stores", r"(\d+) bytes spill loads", r"Used (\d+) registers")
    )
    return Resources(int(registers), int(stored), int(loaded), kernel.metadata.shared)


def compiled_inductor(name: str, text: str, capability: int) -> list[Resources]:
    """Compile one of Inductor's kernels with each configuration that it would try."""
    set_driver(TARGETS[capability])
    compiler = importlib.import_module("triton.compiler")
    with tempfile.TemporaryDirectory() as folder:  # Triton reads a kernel's source from its file
        path = Path(folder) / f"{name}.py"
        path.write_text(text)
        spec: Any = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        tuner, resources = getattr(module, name), []
        for tuned in tuner.configs:
            meta = tuner._create_compile_meta(tuned)
            source = compiler.ASTSource(tuner.fn, meta["signature"], meta["constants"], meta["configs"][0])
            resources.append(compiled(source, meta["cc"], tuner._create_compile_options(tuned, meta)))
    return resources
