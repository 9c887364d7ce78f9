"""Under torch.compile: one graph, the same gradients, a graph that does not grow with the ring.

The whole pass is one opaque operator, so what is checked here is what surrounds it: that nothing breaks the
graph, that the fake implementation tells the truth, and that a compiled function never attends with the
mesh, pattern or scale of another call.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from ds_ring import (
    Causal,
    Full,
    MaskMod,
    PassOptions,
    RingAttention,
    RingError,
    RingMesh,
    halo,
    make_layout,
    ring_attention,
    ring_scan,
)
from ds_ring.layers.latents.attention import latent_attention
from ds_ring.ops.context import KEPT_CONTEXTS, ContextCache, get_ring_context, make_ring_context
from ds_ring.ops.options import Options
from tests.cases import Shape, tensors
from tests.dist.compiled_rounds import BACKENDS, play
from tests.dist.harness import Pool, run_ranks
from tests.reference import relative_error

pytestmark = pytest.mark.needs("compiler")

# Graphs, guards and operators are the same for both, and `opcheck` compares the operators' fake results with real
# ones. Inductor's C++ takes the compiler half a minute.
each_backend = pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.night)]
)
HEADS, HEAD_DIM, TOKENS = 4, 8, 96  # 96: shards of 2 and of 3 ranks
WIDTH = HEADS * HEAD_DIM


class Block(nn.Module):
    """A transformer block, as small as one can be."""

    def __init__(self, mesh: RingMesh) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.attention = RingAttention(Causal(), mesh=mesh)

    def forward(self, x_BSW: Tensor) -> Tensor:
        batch, tokens, _ = x_BSW.shape
        heads = self.qkv(self.norm1(x_BSW)).view(batch, tokens, 3, HEADS, HEAD_DIM)
        q, k, v = (part.transpose(1, 2) for part in heads.unbind(2))
        x_BSW = x_BSW + self.out(self.attention(q, k, v).transpose(1, 2).reshape(batch, tokens, WIDTH))
        return x_BSW + self.mlp(self.norm2(x_BSW))


class Graphs:
    """A backend that counts the nodes of the graphs that Dynamo hands it, and leaves the rest to another one."""

    def __init__(self, inner: str) -> None:
        self.nodes: list[int] = []
        self._inner = torch._dynamo.lookup_backend(inner)

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        self.nodes.append(len(graph.graph.nodes))
        return self._inner(graph, inputs)  # type: ignore[no-any-return]


class Compiled(NamedTuple):
    """A compiled block held against the same block, eager.

    Attributes:
        graphs, breaks: as Dynamo counts them.
        nodes: of each graph.
        errors: relative error of the output, of the input's gradient and of every parameter's, by name.
    """

    graphs: int
    breaks: int
    nodes: list[int]
    errors: dict[str, float]


def gradients(block: Callable[[Tensor], Tensor], parameters: dict[str, nn.Parameter], x: Tensor) -> dict:
    """Output and gradients of a weighted sum of it."""
    x = x.clone().requires_grad_()
    for parameter in parameters.values():
        parameter.grad = None
    out = block(x)
    (out * torch.linspace(0.5, 1.5, out.numel()).view_as(out)).sum().backward()
    result = {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}
    assert len(result) == len(parameters)
    return {"out": out.detach(), "x": x.grad, **result}


def compiled_block(
    rank: int,
    world_size: int,
    ulysses_size: int,
    inner: tuple[str, ...] = ("inductor",),
    steps: int = 2,
    kind: Callable[[RingMesh], nn.Module] = Block,
) -> Compiled:
    """Some steps of a block compiled by inner[rank], or the last, against the eager one, on this rank's shard."""
    torch._dynamo.reset()
    counters.clear()
    mesh = RingMesh.from_world(world_size // ulysses_size, ulysses_size)
    block = kind(mesh).double()  # so that another order of summation does not matter
    parameters = dict(block.named_parameters())
    graphs = Graphs(inner[min(rank, len(inner) - 1)])
    compiled = torch.compile(block, fullgraph=True, backend=graphs)
    errors: dict[str, float] = {}
    for step in range(steps):
        generator = torch.Generator().manual_seed(100 * step + rank)
        x = torch.randn(2, TOKENS // world_size, WIDTH, generator=generator, dtype=torch.float64)
        got, want = gradients(compiled, parameters, x), gradients(block, parameters, x)
        for name in want:
            errors[name] = max(errors.get(name, 0.0), relative_error(got[name], want[name]))
    breaks = sum(counters["graph_break"].values())
    return Compiled(counters["stats"]["unique_graphs"], breaks, graphs.nodes, errors)


@pytest.mark.parametrize("inner", [("aot_eager",), ("inductor",)], ids="-".join)
@pytest.mark.parametrize(("world_size", "ulysses_size"), [(3, 1), (2, 2)])
@pytest.mark.day("2-2-aot_eager")
def test_a_transformer_block_is_one_graph_with_eager_gradients(
    rank_pool: Pool, world_size: int, ulysses_size: int, inner: tuple[str, ...]
) -> None:
    for result in rank_pool(world_size).run(compiled_block, ulysses_size, inner, timeout_s=120):
        assert (result.graphs, result.breaks, len(result.nodes)) == (1, 0, 1), result
        assert len(result.errors) == 2 + 12 and max(result.errors.values()) < 1e-10, result.errors


@pytest.mark.night
def test_the_graph_does_not_grow_with_the_ring() -> None:
    """On fresh ranks: what was compiled in a process before may make sizes symbolic, which adds nodes."""
    two, three = (run_ranks(compiled_block, size, 1, steps=1, timeout_s=120) for size in (2, 3))
    assert {tuple(result.nodes) for result in (*two, *three)} == {tuple(two[0].nodes)}


def not_mixed_up(rank: int, world_size: int, backend: str) -> dict[str, tuple[float, float]]:
    """One compiled function, called with other meshes, patterns, layouts and scales, and so once more.

    Distances to the eager result of the same arguments, and of the arguments before; the meshes of one rank
    and of all ranks give different results, as do all other changes.
    """
    torch._dynamo.reset()
    whole, alone = RingMesh.from_world(world_size), RingMesh.single()
    q, k, v, _ = tensors(Shape(batch=1, tokens=32), seed=rank)

    def attend(
        mesh: RingMesh, pattern: Any, layout: Any, scale: float | None, q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        return ring_attention(q, k, v, pattern=pattern, layout=layout, mesh=mesh, scale=scale)

    compiled = torch.compile(attend, fullgraph=True, backend=backend)
    causal = Causal()
    calls = {
        "first": (whole, causal, "zigzag", None),
        "mesh": (alone, causal, "zigzag", None),
        "pattern": (alone, Full(), "zigzag", None),
        "scale": (alone, Full(), "zigzag", 0.5),
        "another scale": (alone, Full(), "zigzag", 1.5),
        "third scale": (alone, Full(), "zigzag", 3),
        "layout": (whole, causal, "contiguous", 3),
        "layout of another length": (
            whole,
            causal,
            make_layout("contiguous", tokens=63, ring_size=world_size),
            3,
        ),
        "first again": (whole, causal, "zigzag", None),
    }
    result, before = {}, torch.zeros_like(q)
    for name, arguments in calls.items():
        got, want = compiled(*arguments, q, k, v), attend(*arguments, q, k, v)
        result[name] = (float((got - want).abs().max()), float((got - before).abs().max()))
        before = got
    return result


@each_backend
def test_a_compiled_function_never_attends_with_the_arguments_of_another_call(
    rank_pool: Pool, backend: str
) -> None:
    for result in rank_pool(2).run(not_mixed_up, backend, timeout_s=120):
        for name, (to_the_same, to_the_one_before) in result.items():
            assert to_the_same < 1e-6, (name, result)
            assert to_the_one_before > 1e-3 or name == "layout of another length", (name, result)


def options_reach_the_operator(rank: int, world_size: int, backend: str) -> list[Options]:
    """The options of the contexts that a compiled call made, arguments by keyword and objects made inline."""
    torch._dynamo.reset()
    mesh = RingMesh.single()
    q, k, v, _ = tensors(Shape(batch=1, tokens=16))
    options = PassOptions(overlap=False, prune=False, hop_timeout_seconds=7.0)

    @torch.compile(fullgraph=True, backend=backend)
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ring_attention(
            q,
            k,
            v,
            pattern=Causal(),
            layout="zigzag",
            mesh=mesh,
            scale=0.125,
            kernel="reference",
            options=options,
        )

    attend(q, k, v)
    return [context.options for context in mesh.owners[ContextCache].by_key.values()]


@each_backend
def test_options_reach_the_operator_of_a_compiled_call(rank_pool: Pool, backend: str) -> None:
    wanted = Options(scale=0.125, kernel="reference", overlap=False, prune=False, hop_timeout_seconds=7.0)
    assert rank_pool(1).run(options_reach_the_operator, backend) == [[wanted]]


def handle_lives_on(rank: int, world_size: int, backend: str) -> bool:
    """A compiled module keeps its mesh and context alive, and a context dies with them."""
    torch._dynamo.reset()
    module = RingAttention(Causal(), mesh=RingMesh.from_world(world_size))
    handle = module.context.handle
    compiled = torch.compile(module, fullgraph=True, backend=backend)
    q, k, v, _ = tensors(Shape(batch=1, tokens=8), seed=rank)
    first = compiled(q, k, v)
    for _ in range(20):  # other meshes come and go
        make_ring_context(Causal(), "zigzag", RingMesh.single(), Options())
    gone = make_ring_context(Causal(), "zigzag", RingMesh.single(), Options()).handle
    gc.collect()  # a mesh and its contexts hold each other
    assert get_ring_context(handle) is module.context
    assert torch.equal(compiled(q, k, v), first)
    with pytest.raises(AssertionError, match="is gone"):
        get_ring_context(gone)
    return True


@each_backend
def test_the_handle_stays_valid_while_the_module_lives(rank_pool: Pool, backend: str) -> None:
    assert all(rank_pool(2).run(handle_lives_on, backend, timeout_s=120))


def handle_is_not_pushed_out(rank: int, world_size: int, backend: str) -> bool:
    """Documents make a context for every batch, and the oldest are dropped: not those of compiled graphs."""
    torch._dynamo.reset()
    mesh = RingMesh.single()
    q, k, v, _ = tensors(Shape(batch=1, tokens=8))
    compiled = torch.compile(
        lambda q, k, v: ring_attention(q, k, v, pattern=Causal(), layout="zigzag", mesh=mesh),
        fullgraph=True,
        backend=backend,
    )
    first = compiled(q, k, v)
    for scale in range(1, KEPT_CONTEXTS + 10):
        make_ring_context(Causal(), "zigzag", mesh, Options(scale=scale))
    assert len(mesh.owners[ContextCache].by_key) == KEPT_CONTEXTS + 1
    return torch.equal(compiled(q, k, v), first)


@each_backend
def test_the_handle_of_a_compiled_function_is_not_pushed_out(rank_pool: Pool, backend: str) -> None:
    assert rank_pool(1).run(handle_is_not_pushed_out, backend) == [True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.day("dtype0")
def test_opcheck(dtype: torch.dtype) -> None:
    """torch's own checks of an operator: schema, fake implementation, gradient, dynamic shapes."""
    context = make_ring_context(Causal(), "contiguous", RingMesh.single(), Options())
    q, k, v, _ = (x[:1, :, :7] for x in tensors(Shape(tokens=8), dtype))  # not contiguous, and ragged
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    operator = torch.ops.ds_ring.ring_attention.default
    torch.library.opcheck(operator, (*leaves, context.handle))
    out, lse = operator(q, k, v, context.handle)
    backward = torch.ops.ds_ring.ring_attention_backward.default
    torch.library.opcheck(backward, (torch.ones_like(out), q, k, v, out, lse, context.handle))
    swap = torch.ops.ds_ring.swap_heads_tokens.default
    torch.library.opcheck(swap, (leaves, "Ulysses of q, k, v", context.handle))


SPAN = 16  # tokens of the calls below


def by_number(x: float) -> Any:
    return lambda s, b, h, q, k: s + x * (q - k)


def by_default(x: float) -> Any:
    return lambda s, b, h, q, k, x=x: s + x * (q - k)


def by_keyword(x: float) -> Any:
    def score(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor, *, x: float = x) -> Tensor:
        return s + x * (q - k)

    return score


def by_attribute(x: float) -> Any:
    def score(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return s + score.x * (q - k)  # type: ignore[attr-defined,no-any-return]

    score.x = x  # type: ignore[attr-defined]
    return score


def by_table(x: float) -> Any:
    table = x * torch.arange(SPAN)
    return lambda s, b, h, q, k: s + table[k]


class Tilted:
    def __init__(self, x: float) -> None:
        self.x = x

    def score(self, s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return s + self.x * (q - k)

    __call__ = score


def by_partial(x: float) -> Any:
    return partial(lambda x, s, b, h, q, k: s + x * (q - k), x)


def by_compiled(x: float) -> Any:
    return torch.compile(by_number(x), backend="eager")


def window(x: float) -> Any:
    return lambda b, h, q, k: q - k < 10 * x


def window_default(x: float) -> Any:
    return lambda b, h, q, k, x=x: q - k < 10 * x


def documents(x: float) -> Any:
    ids = torch.arange(SPAN) // int(10 * x)
    return lambda b, h, q, k: ids[q] == ids[k]


def compiled_window(x: float) -> Any:
    return torch.compile(window(x), backend="eager")


SCORES = {
    "a number": by_number,
    "a default": by_default,
    "a keyword's default": by_keyword,
    "an attribute of the function": by_attribute,
    "a tensor": by_table,
    "an object": Tilted,
    "a method": lambda x: Tilted(x).score,
    "a partial": by_partial,
    "a compiled function": by_compiled,
}
MASKS = {
    "a mask's number": window,
    "a mask's default": window_default,
    "a mask's tensor": documents,
    "a compiled mask": compiled_window,
}
CAPTURED = {**SCORES, **MASKS}
VALUES = (0.3, 0.9, 0.3)


class Attends(nn.Module):
    """Attend with a function of the module, or one that its forward makes of numbers and tensors."""

    def __init__(self, function: Any, inside: str = "") -> None:
        super().__init__()
        self.function, self.inside = function, inside
        self.mesh = RingMesh.single()
        self.register_buffer("table", torch.arange(SPAN) * (0.1 if function is None else 0.0))
        self.number = 0.3

    def forward(self, q: Tensor, k: Tensor, v: Tensor, operands: Any = None) -> Tensor:
        pattern, function, table = Causal(), self.function if operands is None else operands, self.table
        where: dict[str, Any] = {"layout": "contiguous", "mesh": self.mesh}
        if self.inside == "mask":
            return ring_attention(q, k, v, pattern=MaskMod(function) & pattern, **where)  # type: ignore[no-any-return]
        if self.inside == "a buffer":
            function = lambda s, b, h, q, k: s + table[k]  # noqa: E731
        if self.inside == "self":
            function = lambda s, b, h, q, k: s + self.number * (q - k)  # noqa: E731
        if self.inside == "an argument":
            function = lambda s, b, h, q, k: s + operands * (q - k)  # noqa: E731
        if self.inside == "a computed tensor":
            table = q.sum((0, 1, 3))
            function = lambda s, b, h, q, k: s + table[k]  # noqa: E731
        return ring_attention(q, k, v, pattern=pattern, score_mod=function, **where)  # type: ignore[no-any-return]


def distance(compiled: Any, module: Attends, *operands: Any) -> float:
    q, k, v, _ = tensors(Shape(batch=1, tokens=SPAN, query_heads=2, kv_heads=2))
    got, want = compiled(q, k, v, *operands), module.forward(q, k, v, *operands)
    return float((got - want).abs().max())


def argument(name: str) -> list[float]:
    """The function is an argument of a compiled one."""
    module = Attends(None, "mask" if name in MASKS else "")
    compiled = torch.compile(module.forward, fullgraph=True, backend="eager")
    return [distance(compiled, module, CAPTURED[name](x)) for x in VALUES]


def attribute(name: str) -> list[float]:
    """An attribute of a compiled module is set anew."""
    module = Attends(None, "mask" if name in MASKS else "")
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    result = []
    for x in VALUES:
        module.function = CAPTURED[name](x)
        result.append(distance(compiled, module))
    return result


def layers(name: str) -> list[float]:
    """Equal layers are compiled one by one: they share their code, and so their graphs."""
    modules = [Attends(CAPTURED[name](x), "mask" if name in MASKS else "") for x in VALUES]
    for module in modules:
        module.compile(fullgraph=True, backend="eager")
    return [distance(module, module) for module in modules]


def written(name: str) -> list[float]:
    """The same function, whose captured list, tensor or object changes between calls, counted or not."""
    numbers, table, tilted = [0.3], torch.arange(SPAN) * 0.3, Tilted(0.3)
    changes: dict[str, tuple[Any, Any]] = {
        "list": (lambda s, b, h, q, k: s + numbers[0] * (q - k), lambda x: numbers.__setitem__(0, x)),
        "in place": (lambda s, b, h, q, k: s + table[k], lambda x: table.mul_(x)),
        "data": (lambda s, b, h, q, k: s + table[k], lambda x: table.data.mul_(x)),
        "numpy": (lambda s, b, h, q, k: s + table[k], lambda x: np.multiply(table.numpy(), x, table.numpy())),
        "object": (tilted, lambda x: setattr(tilted, "x", x)),
    }
    function, change = changes[name]
    module = Attends(function)
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    result = []
    for x in (1.0, 3.0, 0.2):
        change(x)
        result.append(distance(compiled, module))
    return result


def made_inside(name: str) -> list[float]:
    """`forward` makes the function of what it has."""
    module = Attends(None, name)
    compiled = torch.compile(module.forward, fullgraph=True, backend="eager")
    operands = VALUES if name == "an argument" else (None, None)
    result = []
    for step, item in enumerate(operands):
        module.number = 0.3 + step
        result.append(distance(compiled, module, item))
        module.table += 0.1 * module.table.flip(0)
    return result


def captured(rank: int, world_size: int, how: str, name: str) -> list[float] | str:
    torch._dynamo.reset()
    kinds = {item.__name__: item for item in (argument, attribute, layers, written, made_inside)}
    try:
        return kinds[how](name)
    except RingError as error:
        return str(error)


ROWS = [
    *(("argument", name) for name in CAPTURED),
    *((how, name) for how in ("attribute", "layers") for name in ("a number", "a mask's tensor")),
    *(("written", name) for name in ("list", "in place", "data", "numpy", "object")),
    *(("made_inside", name) for name in ("a buffer", "self", "an argument")),
]


# What a default, an attribute, an object or an array holds is captured by day in tests/unit/patterns/captured.
@pytest.mark.situation("compile", "a mask or score function captures other values in the next call")
@pytest.mark.parametrize(("how", "name"), ROWS, ids=lambda item: item.replace(" ", "_"))
@pytest.mark.day(
    "argument-a_tensor", "argument-a_compiled_function", "layers-a_mask's_tensor", "written-object",
    "made_inside-an_argument",
)  # fmt: skip
def test_a_compiled_function_sees_what_a_function_of_pairs_has_captured(
    rank_pool: Pool, how: str, name: str
) -> None:
    (result,) = rank_pool(1).run(captured, how, name)
    assert not isinstance(result, str) and max(result) < 1e-6, result


@pytest.mark.situation("compile", "a score_mod made inside of a compiled function captures a computed tensor")
def test_a_function_made_inside_of_a_computed_tensor_is_named(rank_pool: Pool) -> None:
    (result,) = rank_pool(1).run(captured, "made_inside", "a computed tensor")
    assert isinstance(result, str) and "a tensor that is computed inside" in result, result


def shared_cache(rank: int, world_size: int, folder: str, names: list[str]) -> dict[str, list[float]]:
    """Compile functions whose graphs differ by rank, with Inductor's cache in this folder; errors against eager."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    ring, heads = RingMesh.from_world(world_size), RingMesh.from_world(1, world_size)
    zigzag = make_layout(
        "zigzag", tokens=16, ring_size=world_size
    )  # the first rank has two runs, the last one
    whole = make_layout("contiguous", tokens=16, ring_size=1)
    assert len(zigzag.runs(ring.ring_rank)) == world_size - rank

    def haloed(x: Tensor) -> Tensor:
        return halo(x, 2, 1, dim=1, layout=zigzag, mesh=ring)

    def scanned(transition: Tensor, increment: Tensor) -> Tensor:
        return ring_scan(transition, increment, layout=zigzag, mesh=ring)

    def with_sinks(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        where: dict[str, Any] = {"layout": whole, "mesh": heads}
        return ring_attention(q, k, v, pattern=Causal(), sinks=sinks, **where)  # type: ignore[no-any-return]

    def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ring_attention(q, k, v, pattern=Causal(), layout=zigzag, mesh=ring)  # type: ignore[no-any-return]

    def latents(q: Tensor, latent: Tensor, rope: Tensor, up: Tensor) -> Tensor:
        where: dict[str, Any] = {"layout": whole, "mesh": heads}
        return latent_attention(q, latent, rope, up, pattern=Causal(), **where)  # type: ignore[no-any-return]

    def randn(*shape: int) -> Tensor:
        generator = torch.Generator().manual_seed(len(shape) + 10 * shape[-1])
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    qkv, runs = [randn(1, heads, 8, 16) for heads in (4, 2, 2)], len(zigzag.runs(ring.ring_rank))
    calls: dict[str, tuple[Callable[..., Tensor], list[Tensor]]] = {
        "halo": (haloed, [randn(2, 8, 3)]),
        "scan": (scanned, [randn(runs, 2, 3), randn(runs, 2, 3)]),
        "attention": (attended, qkv),
        "sinks and Ulysses": (with_sinks, [*qkv, torch.linspace(-1, 1, 4, dtype=torch.float64)]),
        "latents and Ulysses": (
            latents,
            [randn(1, 4, 8, 12), randn(1, 1, 8, 6), randn(1, 1, 8, 4), randn(4 * 16, 6)],
        ),
    }
    result: dict[str, list[float]] = {}
    for name in names:
        function, inputs = calls[name]
        both = []
        for run in (function, torch.compile(function, fullgraph=True)):
            operands = [x.clone().requires_grad_() for x in inputs]
            out = run(*operands)
            out.backward(torch.ones_like(out))
            both.append([out.detach(), *(x.grad for x in operands if x.grad is not None)])
        result[name] = [float((a - b).abs().max()) for a, b in zip(*both, strict=True)]
    return result


SHARED = ["halo", "scan", "attention", "sinks and Ulysses", "latents and Ulysses"]


@pytest.mark.night
@pytest.mark.situation("compile", "a second run takes Inductor's graphs from disk, of ranks with other sizes")
@pytest.mark.parametrize("names", [["halo"], SHARED], ids=["halo", "all"])
def test_ranks_with_other_sizes_share_the_cache_of_graphs(tmp_path: Path, names: list[str]) -> None:
    for _ in range(2):  # with an empty cache, and with a warm one in new processes
        for result in run_ranks(shared_cache, 2, str(tmp_path), names, timeout_s=600):
            assert max(max(errors) for errors in result.values()) < 1e-12, result


@pytest.mark.night
@pytest.mark.situation(
    "compile", "one compiled function is called with other arguments and captured values each time"
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_random_calls_of_a_compiled_function_are_eager_ones(rank_pool: Pool, backend: str) -> None:
    for seed in (1, 2):
        for result in rank_pool(2).run(play, seed, backend, timeout_s=600):
            assert not result.wrong, result.wrong
            assert result.equal and all("Ring" in error for error in result.refused), result
