"""Refuse modules and hooks of the user that mix tokens inside a transformers model, in the first step.

A module that works token by token computes on a rank's tokens what it computes on the whole sequence. A mean
over tokens, a shift, something about the last token would be this rank's alone, and no later check shows it.
Owns which modules and hooks are watched, the hooks with which they are, and the error of all ranks. What an
operator does with tokens is token_flow.py's.

Shapes: B samples, S local tokens.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from transformers import PreTrainedModel

from ds_ring.comm.groups import gather_objects
from ds_ring.data.batch_sharding import BatchSharding
from ds_ring.data.engine import DEEPSPEED, ENGINE
from ds_ring.data.session import RingSession
from ds_ring.data.token_flow import Flow, ModuleFlow, get_geometry, list_tensors
from ds_ring.error_origins import is_inside
from ds_ring.errors import RingConfigError
from ds_ring.models.model_adapter import ModelAdapter
from ds_ring.models.variants import encoder_modules
from ds_ring.ops.passes import get_forward_passes
from ds_ring.patches import applied, patch

log = logging.getLogger(__name__)

_KNOWN = ("torch", "transformers", "ds_ring", "peft", "deepspeed", "accelerate", "trl")
# Classes of torch.nn that mix tokens, or entries of a batch, where a model's own code does not name them.
_MIXING = (
    "Conv", "LazyConv", "AvgPool", "MaxPool", "AdaptiveAvgPool", "AdaptiveMaxPool", "BatchNorm", "GroupNorm",
    "InstanceNorm", "SyncBatchNorm", "RNN", "LSTM", "GRU", "MultiheadAttention", "Transformer", "Upsample",
    "Softmax2d", "CrossEntropyLoss",
)  # fmt: skip
_part_patch = partial(
    patch, DEEPSPEED.given("part", "torch.nn.Module"), feature="module_watch",
    reason="watches modules and hooks of the user for operators that mix tokens",
    when="the first step of a mode, and a transformers model has such",
)  # fmt: skip
_begins = _part_patch(stage="before_forward", options=("prepend",))
_called = _part_patch(stage="before_forward")
_returned = _part_patch(stage="after_forward", options=("prepend", "always_call"))
_ends = _part_patch(stage="after_forward", options=("always_call",))
_TRIES = 8  # passes of batches that are not cut on every rank, after which nothing is watched any more
# Relative to an entry and to a typical one: what another order of sums explains.
_ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-4}
_ROUNDING_16 = 2e-2


class _Call(NamedTuple):
    """What was given to a module, or to hooks, and what they did with tokens."""

    run: Callable[[Any], Any]
    arguments: Any  # the arguments of `run`
    flows: list[Flow | None]  # of the leaves of `arguments`
    fault: str | None
    tokens: int
    attends: bool


@dataclass(eq=False)
class _Entry:
    """A module that is being called."""

    module: nn.Module
    name: str
    outer: ModuleFlow | None  # that watches the code around the call
    arguments: Any  # arguments of the call
    flow: ModuleFlow | None = None  # that watches now
    begun: Any = None  # what `flow` was given
    flows: list[Flow | None] = field(default_factory=list)
    versions: list[Any] = field(default_factory=list)
    passes: int = 0


# [Note: token by token]
# A module is judged twice. `ModuleFlow` follows the dimension of tokens through its operators: what passes
# is right, but an operator that it does not know counts as mixing. So a module that it faults is run again
# on each half of the tokens alone, and on all tokens with the other half changed: if every token keeps its
# results, the module works token by token (experts that sort tokens, say) and is taken.
class ModuleWatch:
    """Watch the modules and hooks of a user in the first forward pass of each mode."""

    def __init__(self, session: RingSession, engine: Any, adapters: list[ModelAdapter]) -> None:
        self._session, self._engine = session, engine
        self._models = [adapter.model for adapter in adapters]
        self._seen = set[bool]()
        self._tries = 0
        self._start()

    def _start(self) -> None:
        self._stack: list[_Entry] = []
        self._active: ModuleFlow | None = None
        self._calls: dict[str, _Call] = {}
        self._samples = 1

    @patch(
        ENGINE, "forward", stage="around_forward", feature="module_watch",
        reason="raises if a module or a hook of the user mixed tokens in the first forward pass of a mode",
    )  # fmt: skip
    def around_forward(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        training, batches = bool(self._engine.module.training), self._session.batches
        rewritten = self._engine.is_compiled and self._session.config.attention == "as_is"
        if training in self._seen or batches.is_off or rewritten:
            return forward(*args, **kwargs)
        sharding = batches.current
        is_cut = sharding.mesh.sequence_size > 1  # or this rank has whole samples of a short batch
        self._start()
        with ExitStack() as stack:
            for number, (name, module, is_users) in enumerate(list(self._watched()) if is_cut else ()):
                if number == 0:  # compiled code calls no hooks
                    stack.enter_context(torch.compiler.set_stance("force_eager"))
                stack.enter_context(applied(*self._hooks(name, module, is_users, sharding), part=module))
            try:
                output = forward(*args, **kwargs)
            finally:
                self._switch(None)
        self._tries += 1
        if self._refuse(sharding, is_cut) or self._tries >= _TRIES:
            self._seen.add(training)
        self._start()
        return output

    # Which modules are watched.

    def _watched(self) -> Iterator[tuple[str, nn.Module, bool]]:
        """Yield (name, module, whether it is the user's) of those to watch, and of those inside them."""
        seen = set[int]()
        for model in self._models:
            apart = encoder_modules(model)
            yield from self._inside("", model, model, False, apart, seen)

    def _inside(
        self, name: str, module: nn.Module, model: nn.Module, within: bool, apart: set[int], seen: set[int]
    ) -> Iterator[tuple[str, nn.Module, bool]]:
        if id(module) in seen or id(module) in apart:
            return
        seen.add(id(module))
        is_users = _is_users(module, model) and module is not model
        hooks = _users_hooks(module._forward_pre_hooks) or _users_hooks(module._forward_hooks)
        is_stock = within and not is_users and _find_home(module) == "transformers"
        if (is_users or hooks or is_stock) and module is not self._engine.module:
            yield name or type(module).__name__, module, is_users
        for key, child in module.named_children():
            if key != "parametrizations":  # of weights
                path = f"{name}.{key}" if name else key
                yield from self._inside(path, child, module, within or is_users, apart, seen)

    def _hooks(self, name: str, module: nn.Module, is_users: bool, sharding: BatchSharding) -> list[Any]:
        # Functions: a copy of the model would copy bound methods, and with them all that they hold.
        before = [] if is_users else _users_hooks(module._forward_pre_hooks)
        after = [] if is_users else _users_hooks(module._forward_hooks)

        @_begins
        def begin(part: nn.Module, args: Any, kwargs: Any) -> None:
            entry = _Entry(part, name, self._active, (args, kwargs), passes=get_forward_passes())
            self._stack.append(entry)
            self._watch(entry, (args, kwargs) if is_users or before else None, sharding)

        @_called
        def called(part: nn.Module, args: Any, kwargs: Any) -> None:
            if not is_users and self._stack:
                run = partial(_run_before, part, before)
                self._judge(self._stack[-1], f"a forward pre-hook of {name}", run, (args, kwargs))
                self._watch(self._stack[-1], None, sharding)

        @_returned
        def returned(part: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if after and self._stack and output is not None:
                self._watch(self._stack[-1], (args, kwargs, output), sharding)

        @_ends
        def end(part: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            while self._stack and self._stack[-1].module is not part:  # of calls that failed
                self._stack.pop()
            if not self._stack:
                return
            entry = self._stack[-1]
            if output is not None and is_users:
                kind = f"{name} ({type(part).__name__})"
                self._judge(entry, kind, lambda call: part(*call[0], **call[1]), output)
            elif output is not None and after:
                run = partial(_run_after, part, after)
                self._judge(entry, f"a forward hook of {name}", run, output)
            inner = entry.flow if is_users else None
            self._stack.pop()
            self._switch(entry.outer)
            if entry.outer is not None:
                entry.outer.take_back(list_tensors(output), inner, list_tensors(entry.arguments))

        return [begin, called, returned, end]

    # While the model runs.

    def _switch(self, flow: ModuleFlow | None) -> None:
        """Let `flow` watch from here on, in place of the one before."""
        if self._active is not None:
            self._active.pause()
        self._active = flow
        if flow is not None:
            flow.resume()

    def _watch(self, entry: _Entry, begun: Any, sharding: BatchSharding) -> None:
        """Watch what is done with `begun`; nothing if it is None."""
        entry.flow, entry.begun = None, begun
        if begun is not None:
            tensors = list_tensors(begun)
            both = [sharding] if sharding.encoder is None else [sharding, sharding.encoder]
            sizes = [part.local_tokens for part in both]
            by_token = [x for x in tensors if x.ndim >= 2 and x.shape[1] in sizes]
            tokens = int(by_token[0].shape[1]) if by_token else sizes[0]
            self._samples = max([int(x.shape[0]) for x in by_token] or [self._samples])
            frame: Any = sys._getframe(1)
            while frame is not None and frame.f_code.co_name != "_call_impl":
                frame = frame.f_back
            entry.flow = ModuleFlow(tokens, self._samples, None if frame is None else id(frame))
            outer = entry.outer
            entry.flows = entry.flow.take(tensors, outer)
            entry.versions = [_version(x) for x in tensors]
        self._switch(entry.flow)

    def _judge(self, entry: _Entry, name: str, run: Callable[[Any], Any], results: Any) -> None:
        """Record what the code that ends here did with tokens."""
        flow = entry.flow
        if flow is None or torch.compiler.is_compiling():
            return
        self._switch(None)
        inputs, outputs = list_tensors(entry.begun), list_tensors(results)
        if name.startswith("a forward"):  # hooks that read do no harm
            versions = [_version(x) for x in outputs]
            if all(any(version == earlier for earlier in entry.versions) for version in versions):
                flow.fault = None
                return
        flow.check(outputs, inputs)
        if self._calls.get(name) is None or (flow.fault and self._calls[name].fault is None):
            begun = tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, entry.begun)
            attends = get_forward_passes() != entry.passes and not name.startswith("a forward")
            self._calls[name] = _Call(run, begun, entry.flows, flow.fault, flow._tokens, attends)

    # After the forward pass.

    def _refuse(self, sharding: BatchSharding, is_cut: bool) -> bool:
        """Raise on all ranks if a module or hooks mixed tokens on one; return whether they were watched.
        Collective.
        """
        mine = {name: call.fault for name, call in self._calls.items() if call.fault is not None}
        # At ZeRO 3 a module that runs again gathers its weights from all ranks of the world.
        sharded = any(hasattr(parameter, "ds_id") for parameter in self._engine.module.parameters())
        everyones = self._gathered((mine, set(self._calls), is_cut), sharded)
        watched = [report[2] for report in everyones]
        if not any(watched) or (sharded and not all(watched)):
            return False
        faults = {name: fault for report in everyones for name, fault in report[0].items()}
        if not faults:
            return True
        on_all = set.intersection(*(report[1] for report in everyones))
        runs = [name for name in faults if name in self._calls and (name in on_all or not sharded)]
        with torch.no_grad():
            right = {name for name in runs if _is_by_token(self._calls[name])}
        mine = {name: fault for name, fault in mine.items() if name in runs and name not in right}
        wrong = {name: fault for part in self._gathered(mine, sharded) for name, fault in part.items()}
        if not wrong:
            log.info("modules that sort or gather tokens work token by token: %s", ", ".join(faults))
            return True
        name, fault = next(iter(wrong.items()))
        others = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise RingConfigError(
            f"{name}: expected a result of each token that depends on that token alone, got {fault}{others}:"
            f" a rank has {sharding.local_tokens} of the {sharding.layout.tokens} tokens of a sequence, so"
            " one process would compute something else; let it work on engine.ring.gather(x), or if this is"
            ' what you mean, set "check_modules": false in the "ring_attention" section'
        )

    def _gathered(self, mine: Any, of_world: bool) -> list[Any]:
        """Return what all ranks of the sequence, or of the world, give. Collective."""
        group = dist.group.WORLD if of_world else self._session.run_mesh.sequence_group
        return [mine] if group is None else gather_objects(mine, group)


def _version(x: Tensor) -> Any:
    """Return what changes if a tensor is replaced or written to."""
    return object() if x.is_inference() else (get_geometry(x), x._version)


# Whose a module or a hook is.


def _find_home(module: nn.Module) -> str:
    """Return the package of a module's forward."""
    function: Any = vars(module).get("forward") or type(module).forward
    return _package(function)


def _package(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    function = getattr(function, "__func__", function)
    home = getattr(function, "__module__", None) if inspect.isroutine(function) else type(function).__module__
    return str(home).partition(".")[0]


def _is_users(module: nn.Module, parent: nn.Module) -> bool:
    """Return whether a module may do what no model of transformers does."""
    home = _find_home(module)
    if home == "torch" and type(module).__module__.startswith("torch.nn.modules"):
        kind = type(module).__name__
        return kind.startswith(_MIXING) and not _is_named_by(parent, kind)
    if isinstance(module, PreTrainedModel):  # else what is around it reads its tokens
        is_derived = any(is_inside(base.__module__, "transformers.models") for base in type(module).__mro__)
        return home not in _KNOWN and is_derived
    return home not in _KNOWN


def _is_named_by(parent: nn.Module, kind: str) -> bool:
    """Return whether the file of a transformers module names a class of torch.nn: the model has it."""
    if _find_home(parent) != "transformers":
        return False
    source = inspect.getsource(sys.modules[type(parent).__module__])
    return f"nn.{kind}" in source


def _users_hooks(hooks: Mapping[int, Any]) -> list[tuple[int, Any]]:
    return [(key, hook) for key, hook in hooks.items() if _package(hook) not in _KNOWN]


def _run_before(module: nn.Module, hooks: list[tuple[int, Any]], call: Any) -> Any:
    args, kwargs = call
    for key, hook in hooks:
        if key in module._forward_pre_hooks_with_kwargs:
            args, kwargs = hook(module, args, kwargs) or (args, kwargs)
        else:
            changed = hook(module, args)
            args = args if changed is None else changed if isinstance(changed, tuple) else (changed,)
    return args, kwargs


def _run_after(module: nn.Module, hooks: list[tuple[int, Any]], call: Any) -> Any:
    args, kwargs, output = call
    for key, hook in hooks:
        further = (kwargs,) if key in module._forward_hooks_with_kwargs else ()
        changed = hook(module, args, *further, output)
        output = output if changed is None else changed
    return output


# Whether a module works token by token, by running it on other tokens ([Note: token by token]).


def _is_by_token(call: _Call) -> bool:
    """Return whether each token keeps its results when the others change, or are not there."""
    if call.attends or call.tokens < 2:
        return False
    try:
        whole = _run_changed(call, lambda x, flow: x.clone())
        for half in (0, 1):
            alone = _run_changed(call, lambda x, flow: _select_half(x, flow.axis, call, half))  # noqa: B023
            among = _run_changed(call, lambda x, flow: _change_others(x, flow, call, half))  # noqa: B023
            if not len(whole) == len(alone) == len(among):
                return False
            if not all(_agree(*three, call, half) for three in zip(whole, alone, among, strict=True)):
                return False
    except Exception as error:
        log.info("a module cannot be run on half of its tokens: %s: %s", type(error).__name__, error)
        return False
    return True


def _run_changed(call: _Call, change: Callable[[Tensor, Flow], Tensor]) -> list[Tensor]:
    leaves, tree = tree_flatten(call.arguments)
    flows = iter(call.flows)
    arguments = []
    for x in leaves:
        flow = next(flows) if isinstance(x, Tensor) else None
        if isinstance(x, Tensor) and flow is not None and flow.kind == "tokens":
            x = change(x, flow)
        elif isinstance(x, Tensor) and not isinstance(x, nn.Parameter):
            x = x.clone()
        arguments.append(x)
    devices = sorted({x.device.index or 0 for x in arguments if isinstance(x, Tensor) and x.is_cuda})
    with torch.random.fork_rng(devices):
        torch.manual_seed(0)
        return list_tensors(call.run(tree_unflatten(arguments, tree)))


def _rows(size: int, call: _Call, half: int, picked: bool = False) -> Tensor:
    """Return the indices of a half of the tokens in a dimension; samples may be merged into it."""
    if picked or size % call.tokens:
        return torch.arange(size, device="cpu").tensor_split(2)[half]
    return torch.arange(size, device="cpu").view(-1, call.tokens).tensor_split(2, dim=1)[half].flatten()


def _select_half(x: Tensor, axis: int, call: _Call, half: int, picked: bool = False) -> Tensor:
    return x.index_select(axis, _rows(x.shape[axis], call, half, picked).to(x.device))


def _change_others(x: Tensor, flow: Flow, call: _Call, half: int) -> Tensor:
    rows = _rows(x.shape[flow.axis], call, 1 - half).to(x.device)
    others = x.index_select(flow.axis, rows)
    new = 1 - 2 * others if x.is_floating_point() else others.flip(flow.axis)
    return x.index_copy(flow.axis, rows, new)


def _agree(whole: Tensor, alone: Tensor, among: Tensor, call: _Call, half: int) -> bool:
    if whole.ndim != alone.ndim or whole.shape != among.shape:
        return False
    differ = [axis for axis in range(whole.ndim) if whole.shape[axis] != alone.shape[axis]]
    if len(differ) > 1:
        return False
    if differ:
        axis, size = differ[0], whole.shape[differ[0]]
        picked = len(_rows(size, call, half)) != alone.shape[axis]
        whole, among = (_select_half(x, axis, call, half, picked) for x in (whole, among))
    return whole.shape == alone.shape and _close(whole, alone) and _close(whole, among)


def _close(a: Tensor, b: Tensor) -> bool:
    if not a.is_floating_point():
        return torch.equal(a, b)
    tolerance = _ROUNDING.get(a.dtype, _ROUNDING_16)
    a, b = a.double(), b.double()
    typical = float(a.square().mean().sqrt()) if a.numel() else 0.0
    return bool(((a - b).abs() <= tolerance * (a.abs() + typical)).all())
