"""FlexAttention's functions of pairs: a mask function as a pattern (`MaskMod`), and a `ScoreMod` of scores.

[Note: a mask function is a branch]
A `MaskMod` is one branch with a mask function, which is evaluated inside blocks of 256 x 256 positions
(`joins.py`).

[Note: the trace of a mask]
The function is traced with 0-d tensors, as FlexAttention does, and the graph is functionalized: writes to the
function's own tensors become plain operators, so a write that is left goes to an argument or to a captured
tensor, and is refused. Batch or head matter if the graph uses them. The digest hashes the graph and the
captured tensors: it is equal on two ranks only if both are. It is part of the header that ranks compare. A
second trace must have the same digest; a function that counts its calls does not.

[Note: all pairs at once]
A call through vmap costs a millisecond, and a strided layout can have thousands of small tiles. A graph that
has only elementwise operators and look-ups of integers gives the same result for broadcast tensors as for
0-d tensors under vmap, so the graph is called directly. (With captured floats, type promotion could differ.)

[Note: changed scores]
Scores are changed pair by pair as FlexAttention's `score_mod` does: soft caps, ALiBi, any function of a pair,
of global positions and heads. A `score_mod` is a value, as a mask function is: it is traced, and its digest
is part of the header. A kernel gets it with the numbers of the heads that it computes and the positions of
its tiles. A kernel that cannot evaluate it never gets it: "auto" takes `reference` where the fast kernel of
the device cannot, and logs a warning.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import random
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, fx
from torch._decomp import get_decompositions
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import pad

from ds_ring.errors import RingConfigError, RingPatternError, shown, true_or_false
from ds_ring.masks.branches import Branch
from ds_ring.masks.pattern import Pattern, QueryHead
from ds_ring.masks.tiles import IntArray, MaskFunction

_aten = torch.ops.aten
# `and_masks` and `or_masks` call `batch.new_ones`, which takes no value from the batch index: become `full`
_CREATE: Any = get_decompositions([_aten.new_ones, _aten.new_zeros, _aten.new_full, _aten.new_empty])
_STATE_DEPTH = 4  # how deep nested functions are searched for captured values
_SAMPLED = 64  # positions at which a mask is tried before the first pass, beside the first and the last


def _refusal(function: MaskFunction, expected: str, got: str) -> RingPatternError:
    """Return the error for a function that is no mask."""
    return RingPatternError(
        f"MaskMod {name_of(function)}: expected {expected}, got {got}; write it like FlexAttention's"
        " mask_mod, with 0-d tensors of global positions: torch operators only, one boolean for each pair"
    )


def name_of(function: Callable[..., Any]) -> str:
    """Return module and qualified name of a function, of the class of any other callable."""
    if isinstance(function, functools.partial):
        return f"partial of {name_of(function.func)}"
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"


def first_line(error: Exception) -> str:
    """Return the kind of an error and the first line of what it says."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:100] if text else ''}"


def indexed_by_tensors() -> AbstractContextManager[Any]:
    """Return the mode without which `table[position]` reads the position as a Python number."""
    # Imported here: it brings Dynamo, 1.3 s, and few processes have a mask function
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    return TransformGetItemToIndex()


def graph_of(function: MaskFunction) -> fx.GraphModule:
    """Trace a mask function with 0-d tensors, or refuse it; see [Note: the trace of a mask]."""
    arguments = [torch.zeros((), dtype=torch.int64) for _ in range(4)]
    results = []

    def with_result(*args: Tensor) -> Any:  # make_fx returns the graph alone
        results.append(function(*args))
        return results[-1]

    try:
        with torch.no_grad(), indexed_by_tensors():
            traced = make_fx(with_result, tracing_mode="real")(*arguments)
    except Exception as error:
        expected = "a mask_mod(batch, head, q_position, k_position)"
        raise _refusal(function, expected, first_line(error)) from error
    (result,) = results
    is_tensor = isinstance(result, Tensor)
    if not is_tensor or result.dtype != torch.bool or result.dim():
        got = f"{result.dtype} of shape {tuple(result.shape)}" if is_tensor else type(result).__name__
        raise _refusal(function, "a boolean tensor without dimensions", got)
    # torch.cond and while_loop keep their branches as submodules of the graph
    if any(isinstance(module, fx.GraphModule) for module in traced.children()):
        raise _refusal(function, "torch operators on tensors", "control flow (torch.cond, while_loop)")
    no_writes = "a mask that writes to no tensor but its own"
    try:
        with torch.no_grad():
            functional = torch.func.functionalize(lambda *args: traced(*args))
            graph = make_fx(functional, decomposition_table=_CREATE)(*arguments)
    except Exception as error:
        raise _refusal(function, no_writes, first_line(error)) from error
    for node in graph.graph.nodes:
        if not isinstance(node.target, torch._ops.OpOverload):
            continue
        if torch.Tag.nondeterministic_seeded in node.target.tags:
            raise _refusal(function, "a mask without random numbers", f"a call of {node.target}")
        if node.target._schema.is_mutable:
            raise _refusal(function, no_writes, f"a call of {node.target}")
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


def _is_elementwise(graph: fx.GraphModule) -> bool:
    """Return whether the graph may be called with tensors that broadcast; [Note: all pairs at once]."""

    def accepts(node: fx.Node) -> bool:
        if node.op == "get_attr":
            constant = _constant_of(graph, node)
            return not (constant.is_floating_point() or constant.is_complex())
        if node.op != "call_function":
            return True
        if not node.all_input_nodes:  # it makes a tensor
            return node.kwargs.get("dtype") in (torch.bool, torch.int32, torch.int64)
        if node.target is not _aten.index.Tensor:
            return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.pointwise in node.target.tags
        table, indices = cast(tuple[fx.Node, list[fx.Node]], node.args)
        return table.op == "get_attr" and len(indices) == _constant_of(graph, table).dim()

    return all(map(accepts, graph.graph.nodes))


def _constant_of(graph: fx.GraphModule, node: fx.Node) -> Tensor:
    """Return the captured tensor that a node of the graph stands for."""
    return cast(Tensor, functools.reduce(getattr, str(node.target).split("."), graph))


def digest_of(graph: fx.GraphModule) -> str:
    """Hash the graph, in a form that is the same in every process, and the values of its constants."""
    numbers = {node: f"%{number}" for number, node in enumerate(graph.graph.nodes)}
    found = hashlib.sha256()

    def text_of(x: Any) -> Any:
        if isinstance(x, fx.Node):
            return numbers[x]
        # the kind of device only: its number differs from rank to rank
        return x.type if isinstance(x, torch.device) else x

    for node in graph.graph.nodes:
        target = str(node.target)
        if node.op == "get_attr":
            tensor = _constant_of(graph, node).detach().cpu().contiguous()
            # as bytes: numpy has no bfloat16
            data = tensor.reshape(-1).view(torch.uint8) if tensor.numel() else tensor
            values = hashlib.sha256(data.numpy().tobytes()).hexdigest()
            target = f"{tensor.dtype} {tuple(tensor.shape)} {values}"
        elif node.op == "placeholder":
            target = node.op  # how a function calls its arguments is no part of what it does
        arguments = fx.node.map_aggregate((node.args, node.kwargs), text_of)
        found.update(f"{node.op} {target} {arguments}\n".encode())
    return found.hexdigest()[:16]


class MaskFacts(NamedTuple):
    """What a trace says about a mask function; [Note: the trace of a mask]."""

    by_batch: bool  # whether the result depends on the index of the sample
    by_head: bool  # ... and of the query head
    contents: str  # digest of the code and of the captured values
    tensors: tuple[tuple[Tensor, int | None], ...]  # captured, with their number of writes at the trace
    elementwise: Callable[..., Tensor] | None  # the graph, for all positions; [Note: all pairs at once]


def trace_mask(function: MaskFunction) -> MaskFacts:
    """Trace a mask function twice and refuse it if the two graphs differ, or if it draws random numbers."""
    # Random numbers of Python and numpy leave no node in the graph, but they change this state.
    before = random.getstate(), repr(np.random.get_state())
    first, second = (graph_of(function) for _ in range(2))
    contents = digest_of(first)
    if contents != digest_of(second):
        raise _refusal(function, "a mask that is the same at every call", "two traces that differ")
    if before != (random.getstate(), repr(np.random.get_state())):
        raise _refusal(function, "a mask without random numbers", "one that draws them")
    batch, head, *nodes = first.graph.nodes
    constants = (_constant_of(first, node) for node in nodes if node.op == "get_attr")
    # several nodes may read the same captured tensor
    unique = {id(tensor): tensor for tensor in constants}
    versions = tuple((tensor, _writes_to(tensor)) for tensor in unique.values())
    elementwise = first.forward if _is_elementwise(first) else None
    return MaskFacts(bool(batch.users), bool(head.users), contents, versions, elementwise)


def _evaluate(
    function: MaskFunction, facts: MaskFacts, samples: int, heads: tuple[int, ...], q: Tensor, k: Tensor
) -> Tensor:
    """Evaluate a mask function for all pairs of two lists of positions, int64 [n] and [m].

    Returns bool [n, m]; [samples or 1, len(heads) or 1, n, m] if the mask differs by sample or by head.
    """
    # an index that the result does not depend on is a 0-d tensor of 0
    batch = torch.arange(samples, device=q.device) if facts.by_batch else torch.zeros_like(q[0])
    numbers: Any = heads if facts.by_head else 0
    head = torch.tensor(numbers, dtype=torch.int64, device=q.device)
    if facts.elementwise is not None:
        every = batch.view(-1, 1, 1, 1), head.view(-1, 1, 1), q[:, None], k[None]
        shape = batch.numel(), head.numel(), len(q), len(k)
        found = _call(function, facts.elementwise, nullcontext(), *every).expand(shape)
        return found if facts.by_batch or facts.by_head else found[0, 0]
    # The innermost vmap makes the last dimension, so the order is keys, queries, heads, samples.
    mapped: Callable[..., Tensor] = torch.vmap(function, in_dims=(None, None, None, 0))
    mapped = torch.vmap(mapped, in_dims=(None, None, 0, None))
    if facts.by_head:
        mapped = torch.vmap(mapped, in_dims=(None, 0, None, None))
    if facts.by_batch:
        mapped = torch.vmap(mapped, in_dims=(0, None, None, None))
    found = _call(function, mapped, indexed_by_tensors(), batch, head, q, k)
    if facts.by_batch and not facts.by_head:
        return found.unsqueeze(1)
    return found.unsqueeze(0) if facts.by_head and not facts.by_batch else found


def _writes_to(tensor: Tensor) -> int | None:
    """Return the number of writes to a tensor so far; None if torch does not count them."""
    return None if tensor.is_inference() else tensor._version


def _captured_values(function: object, depth: int = _STATE_DEPTH) -> Iterator[object]:
    """Yield what a function captured, in a fixed order: numbers, texts, and the id of any other object.

    If two such lists are equal, a second trace would give the same graph, as far as Python lets us look.
    """
    if isinstance(function, functools.partial):
        parts: list[object] = [function.func, *function.args, *function.keywords.values()]
    elif isinstance(function, types.FunctionType):
        parts = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        for cell in function.__closure__ or ():
            # an empty cell: the function refers to itself and is still being defined
            with contextlib.suppress(ValueError):
                parts.append(cell.cell_contents)
        parts += [function.__globals__.get(name) for name in function.__code__.co_names]
    else:  # a method, or an object with __call__
        owner = getattr(function, "__self__", function)
        code = getattr(function, "__func__", vars(type(function)).get("__call__"))
        names = code.__code__.co_names if isinstance(code, types.FunctionType) else ()
        parts = [code, *(getattr(owner, "__dict__", {}).get(name) for name in names)]
    for part in parts:
        yield from _value(part, depth)


def _value(part: object, depth: int) -> Iterator[object]:
    if part is None or isinstance(part, (bool, int, float, str, bytes)):
        yield part
    elif isinstance(part, (list, tuple)) and depth:
        # The length distinguishes nested lists with the same items, such as [[1], [2]] and [[1, 2]].
        yield len(part)
        for one in part:
            yield from _value(one, depth - 1)
    else:
        # A tensor is identified by its id here; its version tells whether its values have changed.
        yield id(part)
        if depth and callable(part) and not isinstance(part, (type, types.BuiltinFunctionType)):
            yield from _captured_values(part, depth - 1)


def _call(
    function: MaskFunction, mapped: Callable[..., Tensor], mode: AbstractContextManager[Any], *args: Tensor
) -> Tensor:
    try:
        with torch.no_grad(), mode:
            found = mapped(*args)
    except Exception as error:
        where = f"positions up to {int(args[2].max())} and {int(args[3].max())}"
        raise _refusal(function, f"a mask of {where}", first_line(error)) from error
    if found.dtype != torch.bool:
        raise _refusal(function, "a tensor of torch.bool", f"{found.dtype}")
    return found


@dataclass(frozen=True)
class MaskMod(Pattern):
    """Attend by a FlexAttention `mask_mod` of global positions; torch's `and_masks`, `or_masks` compose it.

    It is evaluated as FlexAttention does: with 0-d tensors, by vmap over samples, heads, queries and keys.
    One that depends on the head is evaluated for each head, with the head's number among all query heads of
    the model; one that depends on the batch for each sample, numbered in this rank's batch.

    The function is a value: ranks compare its code and what it captured, numbers and tensors, before
    anything is sent. Whoever changes what it captured makes a new MaskMod.

    What the function hides inside a block is not known to the plan: every pair counts as work, and every key
    travels, unless another pattern composed with `&` says otherwise (`MaskMod(f) & SlidingWindow(1024)`).

    Attributes:
        function: `mask_mod(batch, head, q_position, k_position) -> bool`, of int64 tensors without
            dimensions.
        is_known_causal: set it if the function never shows a key after its query; with `&` Causal() it
            need not be.

    Raises:
        RingPatternError: no function; at its first use, a function that raises, draws random numbers, writes
            to what it captured, or returns no boolean for a pair.
    """

    function: MaskFunction
    is_known_causal: bool = False
    _tried: set[tuple[int, int, int, str]] = field(default_factory=set, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not callable(self.function) or isinstance(self.function, type):
            raise RingPatternError(
                "MaskMod: expected a mask_mod(batch, head, q_position, k_position), got"
                f" {shown(self.function)}; pass a function"
            )
        true_or_false(self.is_known_causal, "MaskMod: is_known_causal", RingPatternError)
        # plans are cached by pattern, so it has to hash
        try:
            hash(self.function)
        except Exception as error:
            raise RingPatternError(
                f"MaskMod: expected a hashable function, got {name_of(self.function)}, whose hash raises"
                f" {type(error).__name__}; wrap it into a function"
            ) from error

    @cached_property
    def facts(self) -> MaskFacts:
        """Return what a trace says of the function, or refuse it."""
        # the dataclass is frozen; `HeadMask.check` compares with it later
        self.__dict__["_captured"] = list(_captured_values(self.function))
        return trace_mask(self.function)

    def branches(self, head: QueryHead) -> tuple[Branch, ...]:
        return (Branch(masks=(HeadMask(self, (head.number,)),)),)

    def __str__(self) -> str:
        """Return the function by name, with a digest of its code and of what it captured."""
        try:
            contents = f", contents {self.facts.contents}"
        # the first use refuses the function; a text of it must not
        except RingPatternError:
            contents = ""
        return f"MaskMod({name_of(self.function)}{contents})"


@dataclass(frozen=True)
class HeadMask:
    """The function of a `MaskMod` for some query heads; empty if the function does not depend on the head.

    Other files of this folder, which do not need torch, call it `PairMask`.
    """

    whole: MaskMod
    heads: tuple[int, ...] = ()

    def __call__(self, samples: int, q: Tensor, k: Tensor) -> Tensor:
        """Return the mask of positions int64 [n] and [m], bool [n, m]; batch and head lead if they matter."""
        return _evaluate(self.whole.function, self.whole.facts, samples, self.heads, q, k)

    def check(self, tokens: int, samples: int, query_heads: int, device: str) -> None:
        """Try the function at some positions, once for each kind of call; see `Pattern.check`."""
        whole, facts, function = self.whole, self.whole.facts, self.whole.function
        written = any(_writes_to(tensor) != version for tensor, version in facts.tensors)
        if written or whole.__dict__["_captured"] != list(_captured_values(function)):
            raise RingPatternError(
                f"MaskMod {name_of(function)}: expected what it captured to stay as it was at its first"
                " use, got other values; make a new MaskMod for a new mask"
            )
        key = (tokens, samples, query_heads, device)
        if key not in whole._tried:
            # spread over the whole sequence, first and last position included
            some = torch.linspace(0, tokens - 1, min(_SAMPLED, tokens), device=device).long()
            _evaluate(function, facts, samples, tuple(range(query_heads)), some, some)
            whole._tried.add(key)

    def pairs(self, q: IntArray, k: IntArray) -> IntArray:
        """Return bool of pairs of positions for the first head; refuse a mask that differs by sample."""
        function = self.whole.function
        if self.whole.facts.by_batch:
            raise _refusal(function, "a mask that is the same for all samples here", "one that is not")
        if not q.size:
            return np.zeros(q.shape, dtype=bool)
        ours, theirs = (torch.from_numpy(x.flatten()) for x in (q, k))  # copies: q and k may be read-only
        pairwise = torch.vmap(function, in_dims=(None, None, 0, 0))
        batch, head = torch.tensor(0), torch.tensor(self.heads[0])
        found = _call(function, pairwise, indexed_by_tensors(), batch, head, ours, theirs)
        return found.numpy().reshape(q.shape)


ScoreFunction = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Softcap:
    """Limit scores to -cap .. cap by cap * tanh(score / cap), as Gemma 2 does: a `score_mod`."""

    cap: float

    def __call__(self, score: Tensor, batch: Any, head: Any, query: Any, key: Any) -> Tensor:
        return self.cap * torch.tanh(score / self.cap)


@dataclass(frozen=True)
class Alibi:
    """Add slope * (key position - query position) to the scores of each head: a `score_mod`."""

    slopes: tuple[float, ...]  # of the model's query heads

    def __call__(self, score: Tensor, batch: Any, head: Any, query: Any, key: Any) -> Tensor:
        slopes = torch.tensor(self.slopes, dtype=score.dtype, device=score.device)
        return score + slopes[head] * (key - query)


_WIDTH = 8  # head dims of kernels are multiples of it


def with_key_terms(q: Tensor, k: Tensor, terms: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return q and k with more dimensions, which add a term of each key to its scores. Differentiable.

    So terms travel with the keys, every kernel adds them, and they get their gradient.

    Args:
        q, k: [B, H, S, D] and [B, G, S, D].
        terms: [B, G, S], finite; what is added to the scores after they are multiplied by `scale`.
        scale: factor of the scores.
    """
    # 1 / scale as a sum of two numbers, which in bfloat16 have 16 bits together.
    inverse = torch.tensor(1 / scale, dtype=torch.float64)
    high = inverse.to(q.dtype)
    low = (inverse - high.double()).to(q.dtype)
    both = torch.stack([high, low]).to(q.device).expand(*q.shape[:-1], 2)
    terms = terms.to(k.dtype).unsqueeze(-1).expand(-1, -1, -1, 2)
    fill = -(q.shape[-1] + 2) % _WIDTH
    return pad(torch.cat([q, both], dim=-1), (0, fill)), pad(torch.cat([k, terms], dim=-1), (0, fill))


@dataclass(frozen=True)
class ScoreMod:
    """Hold a score_mod; equal on two ranks if its code and what it captured are."""

    function: ScoreFunction

    def __post_init__(self) -> None:
        if not callable(self.function) or isinstance(self.function, type):
            raise RingConfigError(
                "score_mod: expected a function (score, batch, head, q_position, k_position) -> score, got"
                f" {shown(self.function)}; write it as for FlexAttention"
            )
        try:
            hash(self.function)
            text = self._contents
        except Exception as error:
            raise RingConfigError(
                f"score_mod {name_of(self.function)}: expected torch operators on tensors without dimensions,"
                f" got {first_line(error)}; write it as for FlexAttention, with nothing that needs a gradient"
            ) from error
        assert text

    @cached_property
    def _contents(self) -> str:
        score, index = torch.zeros(()), torch.zeros((), dtype=torch.int64)
        with torch.no_grad(), indexed_by_tensors():
            graph = make_fx(self.function, tracing_mode="real")(score, index, index, index, index)
        constants = (value for value in vars(graph).values() if isinstance(value, Tensor))
        if any(value.requires_grad for value in constants):
            raise ValueError("a captured tensor that requires a gradient, which it would not get")
        return digest_of(graph)

    def __str__(self) -> str:
        return f"{name_of(self.function)}, contents {self._contents}"


class Scores(NamedTuple):
    """Hold a score_mod and the numbers of the query heads that a kernel is given, among all of the model."""

    mod: ScoreMod
    heads: range

    def of(self, heads: slice) -> Scores:
        """Return the same for some of the heads."""
        return self._replace(heads=self.heads[heads])

    def changed(self, scores_BHQK: Tensor, q_positions: Tensor, k_positions: Tensor) -> Tensor:
        """Return the scores of all pairs as the function changes them."""
        evaluate: Callable[..., Tensor] = self.mod.function
        for argument in (4, 3, 2, 1):  # keys, queries, heads, samples: the innermost is the last dimension
            dims = [0, None, None, None, None]
            dims[argument] = 0
            evaluate = torch.vmap(evaluate, in_dims=tuple(dims))
        device = scores_BHQK.device
        batch, heads = (torch.tensor(x, device=device) for x in (range(len(scores_BHQK)), self.heads))
        with indexed_by_tensors():
            return evaluate(scores_BHQK, batch, heads, q_positions, k_positions).to(scores_BHQK.dtype)

    def gradient(self, scores_BHQK: Tensor, q_positions: Tensor, k_positions: Tensor, grad: Tensor) -> Tensor:
        """Return the gradient of what `changed` was given, from that of what it returned."""
        # torch.func works below autograd, where the ring's operators run
        pull: Any = torch.func.vjp(lambda x: self.changed(x, q_positions, k_positions), scores_BHQK)[1]
        found: Tensor = pull(grad)[0]
        return found
