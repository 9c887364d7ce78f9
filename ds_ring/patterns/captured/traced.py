"""Trace a caller's function of pairs to a graph that holds its own copies of the captured tensors.

Owns the trace, its digest, the function that is made of it, and the walk through the captured objects.
`mask_mod.py` and `score_mod.py` have the requirements on their functions.

[Note: the trace of a mask]
A function is traced with 0-d tensors, as FlexAttention does, and the graph is functionalized: writes to the
function's own tensors become plain operators, so a write that remains is to an argument or to a captured
tensor, and is refused. The digest hashes the graph and the captured tensors: it is equal on two ranks only if
both are. It is part of the header that ranks compare. A second trace must have the same digest; a function
that counts its calls does not.

[Note: traces are values]
Two traces are equal if their graphs and captured values are, even if the functions are different objects:
caches of plans, kernels and contexts compare traces. So kernels evaluate the trace, with copies of the
captured tensors, and never the function: its captured values may change between the two passes of a batch.
Graphs that differ in captured values only share their code, so a compiled kernel takes the tensors as inputs.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import os
import random
import threading
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, is_dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, fx
from torch._decomp import get_decompositions
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import make_fx

from ds_ring.errors import RingError
from ds_ring.masks.pair_masks import ByIdentity

_aten = torch.ops.aten
# `and_masks` and `or_masks` call `batch.new_ones`, which takes no value from the batch index: become `full`
_CREATE: Any = get_decompositions([_aten.new_ones, _aten.new_zeros, _aten.new_full, _aten.new_empty])
SAMPLED = 64  # positions at which a function is tried before the first pass; the first and the last are added
_STATE_DEPTH = 4  # how deep nested functions and objects are searched for captured values
MAX_CODES = 256  # code of so many graphs is kept
_CPU = torch.device("cpu")
_ONE_STANCE = threading.Lock()  # torch has one stance for all threads
_FUNCTORCH = [
    getattr(torch._C.DispatchKey, f"FuncTorch{name}")
    for name in ("Batched", "VmapMode", "GradWrapper", "DynamicLayerFrontMode", "DynamicLayerBackMode")
]

T = TypeVar("T")
PairFunction = Callable[..., Tensor]
MakesRefusal = Callable[[str, str], RingError]  # of (expected, got)


def name_function(function: Callable[..., Any]) -> str:
    """Return module and qualified name of a function, of the class of any other callable."""
    if isinstance(function, functools.partial):
        return f"partial of {name_function(function.func)}"
    function = inspect.unwrap(function)
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"


def uncompiled(function: Any) -> Any:
    """Return what `torch.compile` or `torch.compiler.disable` wrapped; any other object as it is."""
    while True:
        inner = inspect.getattr_static(function, "_torchdynamo_orig_callable", None)
        if isinstance(function, torch.nn.Module):
            inner = vars(function)["_modules"].get("_orig_mod")  # of an OptimizedModule
        if inner is None:
            return function
        function = inner


def first_line(error: Exception) -> str:
    """Return the type of an error and the first line of its message."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:100] if text else ''}"


def indexed_by_tensors() -> AbstractContextManager[Any]:
    """Return the mode without which `table[position]` reads the position as a Python number."""
    # Imported here: it brings Dynamo, 1.3 s, and few processes have a mask function
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    return TransformGetItemToIndex()


@contextlib.contextmanager
def compiled_as_written() -> Iterator[None]:
    """Run a compiled function that is called inside of a trace as it is written."""
    # Imported here: see `indexed_by_tensors`
    from torch._dynamo import config

    with ExitStack() as settings:
        settings.enter_context(config.patch(error_on_nested_fx_trace=False))
        if torch.compiler.is_compiling():  # the thread that waits for this one has Dynamo's lock
            settings.enter_context(_ONE_STANCE)
            settings.enter_context(torch.compiler.set_stance("force_eager"))
        yield


@contextlib.contextmanager
def functorch_allowed() -> Iterator[None]:
    """Let torch.vmap work inside an operator that a compiled graph calls: torch shuts it off there."""
    with ExitStack() as guards:
        for key in _FUNCTORCH:
            guards.enter_context(torch._C._SetExcludeDispatchKeyGuard(key, False))
        yield


class Traced:
    """Hold a graph and its own copies of the captured tensors; [Note: traces are values].

    Attributes:
        graph: with the caller's tensors.
        digest: of the graph and of the captured values.
        captured: the caller's tensors, each once, with their number of writes at the trace.
        constants: copies of these, never written to. (Made without modes: no inference tensors.)
    """

    def __init__(self, graph: fx.GraphModule) -> None:
        self.graph = graph
        self.digest = compute_digest(graph)
        nodes = [node for node in graph.graph.nodes if node.op == "get_attr"]
        # several nodes may read the same captured tensor
        unique = {id(tensor): tensor for tensor in (get_constant(graph, node) for node in nodes)}
        self.captured = [(tensor, writes_to(tensor)) for tensor in unique.values()]
        self.constants = tuple(tensor.detach().clone() for tensor in unique.values())
        numbers = {key: number for number, key in enumerate(unique)}
        self._number_of = {node: numbers[id(get_constant(graph, node))] for node in nodes}
        self._functions: dict[tuple[int, torch.device, Any], PairFunction] = {}

    @property
    def captured_bytes(self) -> int:
        """Return the memory of the copies."""
        return sum(constant.nbytes for constant in self.constants)

    @cached_property
    def value(self) -> tuple[str, ...]:
        """Return a key that is equal for two traces that are interchangeable on this rank."""
        # ranks compare the digest, which leaves out the numbers of devices
        return (self.digest, *(str(constant.device) for constant in self.constants))

    def is_changed(self, function: Callable[..., Any], captured: CapturedValues) -> bool:
        """Return whether a function has captured other values since this trace, as far as Python shows."""
        written = any(writes_to(tensor) != count for tensor, count in self.captured)
        return written or not captured.is_same(function)

    def check_rows(self, argument: int, samples: int, error: type[RingError], name: str) -> None:
        """Refuse a captured table that an index of the sample reads, but that has not a row for each.

        Args:
            argument: the place of the index of the sample among the function's arguments.
            samples: of this rank.
            error, name: for the message.
        """
        for rows in _find_rows(self.graph, argument):
            if rows != samples:
                raise error.wrong(
                    name,
                    f"a table with one row for each of this rank's {samples:,} samples, whose index batch is",
                    f"{rows:,} rows",
                    "ranks may have other samples of a batch, so make the table of the sharded batch:"
                    " engine.ring.gather(batch[key]), as in configs/examples/batch_mask.py",
                )

    def function(self, device: torch.device = _CPU, result: int = 0) -> PairFunction:
        """Return one of the results as a function of the same arguments, on a device."""
        fake = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
        key = (result, device, fake)
        if key in self._functions:
            return self._functions[key]
        with torch.inference_mode(False):
            held = self.constants if fake is None else tuple(map(fake.from_tensor, self.constants))
            # The function was traced on the CPU: so were tensors that it makes of numbers.
            constants = tuple(x.to(device) if _CPU in (x.device, device) else x for x in held)
        code = self._code(result, device, constants)

        def evaluate_pairs(*arguments: Tensor) -> Tensor:
            return cast(Tensor, code(None, *constants, *arguments))

        self._functions[key] = evaluate_pairs
        return evaluate_pairs

    def _code(self, result: int, device: torch.device, constants: tuple[Tensor, ...]) -> Callable[..., Any]:
        """Return the code of one result, whose first arguments are a module (unused) and the constants."""
        graph = fx.Graph()
        inputs = [graph.placeholder(f"constant_{number}") for number in range(len(self.constants))]
        copied: dict[fx.Node, Any] = {}
        for node in self.graph.graph.nodes:
            if node.op == "get_attr":
                copied[node] = inputs[self._number_of[node]]
            elif node.op == "output":
                results = node.args[0] if isinstance(node.args[0], (tuple, list)) else node.args
                graph.output(copied[results[result]])
            else:
                copied[node] = graph.node_copy(node, copied.__getitem__)
                if node.kwargs.get("device") == _CPU:
                    copied[node].kwargs = {**copied[node].kwargs, "device": torch.device(device.type)}
        graph.eliminate_dead_code()
        described = [(x.dtype, tuple(x.shape), x.stride(), x.device) for x in constants]
        key = f"{graph.python_code('self').src} {described}"
        if key not in _codes:
            _codes[key] = type(fx.GraphModule(torch.nn.Module(), graph)).forward
            if len(_codes) > MAX_CODES:
                _codes.popitem(last=False)
        _codes.move_to_end(key)
        return _codes[key]


_codes: OrderedDict[str, Callable[..., Any]] = OrderedDict()  # compiled kernels know code by its object


def trace(
    function: Callable[..., Any], arguments: Sequence[Tensor], refusal: MakesRefusal, what: str,
    signature: str, check: Callable[[Any], None] | None = None,
) -> Traced:  # fmt: skip
    """Trace a function twice; refuse it if the two graphs differ, or if it draws random numbers.

    Args:
        function: of 0-d tensors.
        arguments: examples of them, each a tensor of its own.
        refusal: makes the error.
        what, signature: for messages: "a mask" for example, and the required signature.
        check: raises for an invalid result.
    """
    # Random numbers of Python and numpy leave no node in the graph, but they change this state.
    before = random.getstate(), repr(np.random.get_state())

    def work() -> Traced:
        first, second = (_make_graph(function, arguments, refusal, what, signature, check) for _ in range(2))
        if compute_digest(first) != compute_digest(second):
            raise refusal(f"{what} that is the same at every call", "two traces that differ")
        return Traced(first)

    result = without_modes(work)
    if before != (random.getstate(), repr(np.random.get_state())):
        raise refusal(f"{what} without random numbers", "one that draws them")
    return result


@functools.cache
def _get_tracing_threads() -> ThreadPoolExecutor:
    """Return threads that stay: with torch 2.11, a backward pass crashes once one that traced has ended."""
    return ThreadPoolExecutor(max_workers=64, thread_name_prefix="ds_ring trace")  # as many as trace at once


os.register_at_fork(after_in_child=_get_tracing_threads.cache_clear)  # a child has no threads


def without_modes(work: Callable[[], T]) -> T:
    """Return what `work` returns in a thread of its own, where no mode, hook or transform of torch is on.

    A caller may be in inference mode, in a checkpointed region, in torch.func.vmap or on the meta device.
    """
    return _get_tracing_threads().submit(work).result()


def _make_graph(
    function: Callable[..., Any], arguments: Sequence[Tensor], refusal: MakesRefusal, what: str,
    signature: str, check: Callable[[Any], None] | None,
) -> fx.GraphModule:  # fmt: skip
    """Trace a function with 0-d tensors, or refuse it; see [Note: the trace of a mask]."""
    results, function = [], uncompiled(function)

    def with_result(*args: Tensor) -> Any:  # make_fx returns the graph alone
        results.append(function(*args))
        return results[-1]

    try:
        with torch.no_grad(), indexed_by_tensors(), compiled_as_written():
            traced = make_fx(with_result, tracing_mode="real")(*arguments)
    except Exception as error:
        raise refusal(signature, first_line(error)) from error
    if check is not None:
        check(results[0])
    # torch.cond and while_loop keep their branches as submodules of the graph
    if any(isinstance(module, fx.GraphModule) for module in traced.children()):
        raise refusal("torch operators on tensors", "control flow (torch.cond, while_loop)")
    no_writes = f"{what} that writes to no tensor but its own"
    try:
        with torch.no_grad():
            functional = torch.func.functionalize(lambda *args: traced(*args))
            graph = make_fx(functional, decomposition_table=_CREATE)(*arguments)
    except Exception as error:
        raise refusal(no_writes, first_line(error)) from error
    for node in graph.graph.nodes:
        if not isinstance(node.target, torch._ops.OpOverload):
            continue
        if torch.Tag.nondeterministic_seeded in node.target.tags:
            raise refusal(f"{what} without random numbers", f"a call of {node.target}")
        if node.target._schema.is_mutable:
            raise refusal(no_writes, f"a call of {node.target}")
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


def _find_rows(graph: fx.GraphModule, argument: int) -> set[int]:
    """Return how many rows the captured tables have that an argument of the graph is the index of."""
    nodes = list(graph.graph.nodes)
    indices, tables, rows = {nodes[argument]}, set[fx.Node](), set[int]()
    for node in nodes:
        if node.op == "get_attr" or not tables.isdisjoint(node.all_input_nodes):
            tables.add(node)  # a captured tensor, or what is made of it
        if node.target in _SAME_INDEX and node.args[0] in indices:
            indices.add(node)
        elif node.target in _LOOKUPS and node.args[0] in tables:
            table, *rest = node.args
            shape = table.meta["val"].shape
            rows.update(shape[dim] for dim, index in _LOOKUPS[node.target](*rest) if index in indices)
    return rows


_SAME_INDEX = {getattr(_aten, name).default for name in ("clone", "expand", "view", "unsqueeze", "_to_copy")}
_LOOKUPS: dict[Any, Callable[..., Any]] = {  # the dimensions of the table, and their indices
    _aten.index.Tensor: enumerate,
    _aten.index_select.default: lambda dim, index: [(dim, index)],
    _aten.gather.default: lambda dim, index, **_: [(dim, index)],
    _aten.embedding.default: lambda index, *_: [(0, index)],
}


def get_constant(graph: fx.GraphModule, node: fx.Node) -> Tensor:
    """Return the captured tensor that a node of the graph reads."""
    return cast(Tensor, functools.reduce(getattr, str(node.target).split("."), graph))


def compute_digest(graph: fx.GraphModule) -> str:
    """Hash the graph, in a form that is the same in every process, and the values of its constants."""
    numbers = {node: f"%{number}" for number, node in enumerate(graph.graph.nodes)}
    digest = hashlib.sha256()

    def format_argument(x: Any) -> Any:
        if isinstance(x, fx.Node):
            return numbers[x]
        # the kind of device only: its number differs from rank to rank
        return x.type if isinstance(x, torch.device) else x

    for node in graph.graph.nodes:
        target = str(node.target)
        if node.op == "get_attr":
            tensor = get_constant(graph, node)
            target = f"{tensor.dtype} {tuple(tensor.shape)} {_digest_values(tensor)}"
        elif node.op == "placeholder":
            target = node.op  # names of arguments do not matter
        arguments = fx.node.map_aggregate((node.args, node.kwargs), format_argument)
        digest.update(f"{node.op} {target} {arguments}\n".encode())
    return digest.hexdigest()[:16]


def _digest_values(tensor: Tensor) -> str:
    if isinstance(tensor, FakeTensor):  # has none; a pass over fake tensors compares nothing
        return "fake"
    host = tensor.detach().cpu().contiguous()
    # as bytes: numpy has no bfloat16
    data = host.reshape(-1).view(torch.uint8) if host.numel() else host
    return hashlib.sha256(data.numpy().tobytes()).hexdigest()


def writes_to(tensor: Tensor) -> int | None:
    """Return the number of writes to a tensor so far; None if torch does not count them."""
    return None if tensor.is_inference() else tensor._version


@dataclass(frozen=True, eq=False)
class CapturedValues:
    """Hold what a function captured, as far as Python lets us look.

    Attributes:
        values: in a fixed order numbers, texts, and objects by identity.
        is_all: no other value can change a trace: the function captured numbers and texts alone.
        copies: of the captured tensors, by their order in `values`. `x.data` and numpy write without being
            counted, so contents are compared; None for a tensor without them.
        requires_grad: of the captured tensors.
    """

    values: list[object]
    is_all: bool
    copies: list[Tensor | None]
    requires_grad: list[bool]

    @classmethod
    def by(cls, function: object) -> CapturedValues:
        """Return what a function has captured now."""
        values = _collect_all_values(function)
        tensors = _tensors_in(values)
        copies = without_modes(lambda: list(map(_copy_tensor, tensors))) if tensors else []
        is_all = not any(isinstance(value, _Opaque) for value in values)
        return cls(values, is_all, copies, [x.requires_grad for x in tensors])

    @property
    def tensors(self) -> list[Tensor]:
        """Return the captured tensors."""
        return _tensors_in(self.values)

    def is_same(self, function: object) -> bool:
        """Return whether it has the same code, equal captured numbers, and the same unchanged objects."""
        values = _collect_all_values(function)
        if values != self.values:
            return False
        tensors = _tensors_in(values)
        if [x.requires_grad for x in tensors] != self.requires_grad:
            return False
        both = zip(tensors, self.copies, strict=True)
        pairs = [(tensor, copy) for tensor, copy in both if copy is not None]
        return not pairs or without_modes(lambda: all(_has_bits(*pair) for pair in pairs))


def _collect_all_values(function: object) -> list[object]:
    function = uncompiled(function)
    if not callable(function):
        return list(_value(function, _STATE_DEPTH, set()))
    return [ByIdentity(getattr(function, "__code__", None)), *_walk_values(function, _STATE_DEPTH)]


def _tensors_in(values: list[object]) -> list[Tensor]:
    objects = [box.value for box in values if isinstance(box, _Opaque)]
    contents = [box.value for box in objects if isinstance(box, ByIdentity)]
    return [value for value in contents if isinstance(value, Tensor)]


def _copy_tensor(tensor: Tensor) -> Tensor | None:
    if isinstance(tensor, FakeTensor) or tensor.is_meta or tensor.layout is not torch.strided:
        return None
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def _has_bits(tensor: Tensor, copy: Tensor) -> bool:
    """Return whether a tensor has the contents of a contiguous copy, NaN included."""
    if (tensor.shape, tensor.dtype, tensor.device) != (copy.shape, copy.dtype, copy.device):
        return False
    original = tensor.detach().contiguous()
    return not original.numel() or torch.equal(*(x.reshape(-1).view(torch.uint8) for x in (original, copy)))


class _Opaque(NamedTuple):
    """Mark something that may change unseen."""

    value: object


def _collect_names(code: types.CodeType) -> set[str]:
    """Return the names that a function's code, and the functions defined in it, read."""
    inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return set(code.co_names).union(*map(_collect_names, inner))


def _walk_values(function: object, depth: int) -> Iterator[object]:
    """Yield what a callable captured."""
    function = uncompiled(function)
    if isinstance(function, functools.partial):
        parts: list[object] = [function.func, *function.args, *function.keywords.values()]
        names: set[str] = set()
    elif isinstance(function, types.FunctionType):
        names = _collect_names(function.__code__)
        parts = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        for cell in function.__closure__ or ():
            # an empty cell: the function refers to itself and is still being defined
            with contextlib.suppress(ValueError):
                parts.append(cell.cell_contents)
        variables = function.__globals__
        parts += [variables[name] for name in sorted(names) if name in variables]
    else:  # a method, or an object with __call__
        owner = getattr(function, "__self__", function)
        parts = [getattr(function, "__func__", inspect.getattr_static(function, "__call__", None))]
        names = _collect_names(getattr(parts[0], "__code__", _NO_CODE))
        frozen = is_dataclass(owner) and vars(type(owner))["__dataclass_params__"].frozen
        yield ByIdentity(owner) if frozen else _Opaque(ByIdentity(owner))
        yield from _attributes(owner, depth, names)
    for part in parts:
        yield from _value(part, depth, names)


_NO_CODE = compile("", "", "exec")


def _value(part: object, depth: int, names: set[str]) -> Iterator[object]:
    """Yield comparable values of a captured object; `names` are the attributes that the function reads."""
    if part is None or isinstance(part, (bool, int, float, complex, str, bytes)):
        yield type(part), repr(part)  # True is not 1, and NaN is NaN
    elif isinstance(
        part, (torch.dtype, torch.device, types.BuiltinFunctionType, torch._ops.OpOverloadPacket)
    ):
        yield part
    elif isinstance(part, Tensor):
        yield _Opaque(ByIdentity(part))  # `x.data` and numpy write without being counted
        yield writes_to(part)
    elif isinstance(part, np.ndarray) and not part.dtype.hasobject:
        yield part.shape, str(part.dtype), hash(part.tobytes())
    elif isinstance(part, (list, tuple, dict, set, frozenset)) and depth:
        # The length distinguishes nested lists with the same items, such as [[1], [2]] and [[1, 2]].
        yield len(part)
        for item in (x for pair in part.items() for x in pair) if isinstance(part, dict) else part:
            yield from _value(item, depth - 1, names)
    elif isinstance(part, (types.FunctionType, types.MethodType, functools.partial)) and depth:
        part = uncompiled(part)
        yield ByIdentity(getattr(part, "__code__", None))
        if getattr(part, "__dict__", None):  # attributes of a function
            yield from _attributes(part, depth - 1, names)
        yield from _walk_values(part, depth - 1)
    elif isinstance(part, (types.ModuleType, type)) and _find_package(part) in _UNCHANGING:
        yield ByIdentity(part)
    else:
        yield _Opaque(ByIdentity(part))
        if depth:
            yield from _attributes(part, depth, names)
            if callable(part) and not isinstance(part, type):
                yield from _walk_values(part, depth - 1)


_UNCHANGING = {"torch", "math", "builtins", "ds_ring"}


def _find_package(part: types.ModuleType | type) -> str:
    return (part.__module__ if isinstance(part, type) else part.__name__).partition(".")[0]


def _attributes(owner: object, depth: int, names: set[str]) -> Iterator[object]:
    """Yield the attributes of an object that a function may read by these names."""
    for name in sorted(names):
        # not getattr, which may run code
        value = inspect.getattr_static(owner, name, None)
        for table in ("_buffers", "_parameters", "_modules"):  # of an nn.Module
            value = vars(owner)[table].get(name, value) if isinstance(owner, torch.nn.Module) else value
        is_own = isinstance(owner, types.ModuleType) or name in getattr(owner, "__dict__", {})
        if isinstance(value, types.FunctionType) and depth and not is_own:
            yield from _attributes(owner, depth - 1, _collect_names(value.__code__))  # a method reads others
        elif isinstance(value, property):
            yield _Opaque(None)
            if depth and value.fget is not None:
                yield from _attributes(owner, depth - 1, _collect_names(value.fget.__code__))
        elif isinstance(value, types.MemberDescriptorType):  # of __slots__
            yield from _value(getattr(owner, name, None), depth - 1, names) if depth else ()
        elif value is not None:
            yield from _value(value, max(depth - 1, 0), names)
