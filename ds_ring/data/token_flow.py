"""Follow the token dimension of local tensors through the operators of a module.

Owns the answer to one question about a module's own code: does a result of a token depend on that token
alone, or on the others of this rank's shard too (a last token, a mean, a softmax over tokens)? `TokenFlow`
watches one forward pass on real tensors and changes none of them. An operator that it does not know counts as
one that mixes tokens. What follows from the answer is decided elsewhere.

Shapes: B samples, S local tokens.
"""

from __future__ import annotations

import linecache
import sys
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema, RuntimeSchemaInfo
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

FlowKind = Literal["tokens", "sum", "whole"]


class Flow(NamedTuple):
    """What a tensor is to the tokens of this rank.

    Attributes:
        kind: "tokens": one entry for each local token. "sum": a sum over local tokens, of which other ranks
            have the rest. "whole": a function of ds_ring returned it, which knows of other ranks.
        axis: the dimension of the tokens; its size is S, or a multiple where samples were merged into it.
        picked: the tokens are those that a mask over all of them has chosen.
    """

    kind: FlowKind
    axis: int = -1
    picked: bool = False


class _MixesError(Exception):
    """An operator mixes tokens."""


# Operators by name without overload.
_VIEWS = {
    "view",
    "_unsafe_view",
    "reshape",
    "_reshape_alias",
    "view_copy",
}  # an order of tokens is ours alone
_READS = {"_local_scalar_dense", "equal", "is_nonzero", "item"}  # which DTensor takes for its whole tensor
_EXCHANGES = {"convolution"}  # whose halo DTensor would send
_LOOKUPS = {"gather", "index_select"}  # in a table that may be of this rank's tokens
_RULES = DTensor._op_dispatcher.sharding_propagator
_PACKAGE = __name__.partition(".")[0] + "."
_KNOWN = (_PACKAGE, "transformers.masking_utils")  # of whose masks the ring's attention knows


class _Operation:
    """An operator and what it is called with."""

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        self.name = str(func.overloadpacket.__name__).removesuffix("_")  # as of the one that is not in place
        self.inputs = list_tensors((args, kwargs))


class TokenFlow(TorchDispatchMode):
    """Watch the operators inside the context, without those of `paused`.

    Attributes:
        fault: the first operator that mixes tokens and the line of code that calls it; None so far.
        sums: whether a sum over tokens was taken.
        shifts: whether labels, which came shifted, were shifted again.
        sends: whether the module called collectives of torch.distributed by itself.
    """

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.fault: str | None = None
        self.sums = self.shifts = self.sends = False
        self._tokens = tokens
        # By storage and geometry: autograd passes on other objects than those seen here. The storages are
        # held, so that no other tensor reuses their memory.
        self._flows: dict[Any, tuple[Flow, Any]] = {}
        self._labels: set[Any] = set()
        self._results: set[Any] = set()  # of inner models
        self._frame: int | None = None  # identity of the frame within which operators are watched

    def add_tokens(self, values: Iterable[Any], labels: Any = None) -> None:
        """Take the tensors [B, S, ...] among values for one entry a token."""
        for x in values:
            if isinstance(x, Tensor) and x.ndim >= 2 and x.shape[1] == self._tokens:
                self._put(x, Flow("tokens", 1))
        if isinstance(labels, Tensor):
            self._labels.add(get_geometry(labels))

    def add_results(self, values: Iterable[Tensor], whole: Iterable[Tensor] = ()) -> None:
        """Record the results of an inner model: entries by token, its loss, and values for all tokens."""
        for x in values:
            self._results.add(get_geometry(x))
            if x.ndim == 0:
                self._put(x, Flow("sum"))
        self.add_tokens(values)
        for x in whole:
            self._put(x, Flow("whole"))

    def check_inputs(self, values: Iterable[Any]) -> None:
        """Look at what an inner model is given: tensors of S tokens come from the batch."""
        for x in values:
            if isinstance(x, Tensor) and x.ndim >= 2 and x.shape[1] == self._tokens and self._flow(x) is None:
                self._note(
                    f"a tensor {list(x.shape)} made for this rank's tokens", _find_caller(self._frame)[0]
                )

    def pause(self) -> None:
        """Watch nothing until `resume`."""
        self.__exit__(None, None, None)

    def resume(self) -> None:
        """Watch again."""
        self.__enter__()

    def check_results(self, values: Iterable[Tensor], divided: bool) -> None:
        """Look at what the module returns: a sum over tokens is a loss, if it was `divided` by all labels."""
        for x in values:
            flow = self._flow(x)
            if flow is None and x.ndim > 0 and get_geometry(x) not in self._results:
                self._note(f"a result {list(x.shape)} that is not known to be of tokens", "its end")
            if flow is not None and flow.kind == "sum" and (x.numel() > 1 or (self.sums and not divided)):
                self._note("a sum over tokens", "its end")

    def _put(self, x: Tensor, flow: Flow) -> None:
        self._flows[get_geometry(x)] = flow, x.untyped_storage()

    def _flow(self, x: Tensor) -> Flow | None:
        flow, _ = self._flows.get(get_geometry(x), (None, None))
        return flow

    def _note(self, what: str, where: str) -> None:
        self.fault = self.fault or f"{what} at {where}"

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.fault is None and func.namespace in ("c10d", "_c10d_functional"):
            self.sends |= _is_called_by_user()
            return func(*args, **kwargs)
        is_composite = torch._C._dispatch_has_kernel_for_dispatch_key(
            func.name(), "CompositeImplicitAutograd"
        )
        if self.fault is None and is_composite:
            with self:  # in inference mode these arrive whole
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        op = _Operation(func, args, kwargs)
        flows = self._read_flows(op)
        try:
            result = func(*args, **kwargs)
        except (IndexError, RuntimeError):  # an index, or a tensor, of the whole sequence
            line, is_ours = _find_caller(self._frame)
            if not is_ours and any(flow is not None for flow in flows):
                self._note(f"{func.overloadpacket.__name__} over tokens", line)
            raise
        if op.name == "slice" and get_geometry(args[0]) in self._labels:
            self.shifts |= result.shape != args[0].shape
        if self.fault is not None:
            return result
        outputs, results = list_tensors(result), list[Flow | None]()
        line, is_ours = _find_caller(self._frame)
        if is_ours:
            results = self._ring_results(flows, op.inputs, outputs)
        elif any(flow is not None for flow in flows):
            try:
                results = self._propagate(op, flows, outputs)
            except _MixesError:
                self._note(f"{func.overloadpacket.__name__} over tokens", line)
        for x, flow in zip(outputs, results, strict=False):
            if flow is not None:
                self._put(x, flow)
        return result

    def _read_flows(self, op: _Operation) -> list[Flow | None]:
        """Return what the inputs are; beside a sum over tokens, a zero that it is added to is one, too."""
        flows = [self._flow(x) for x in op.inputs]
        if Flow("sum") in flows and op.name in ("add", "sub"):
            flows = [
                flow or (None if x.numel() > 1 or x.any() else Flow("sum"))
                for x, flow in zip(op.inputs, flows, strict=True)
            ]
        return flows

    def _ring_results(
        self, flows: list[Flow | None], inputs: list[Tensor], outputs: list[Tensor]
    ) -> list[Flow | None]:
        """Return what results of ds_ring are: tokens received from other ranks have no source tensor here."""
        return [Flow("whole")] * len(outputs)

    def _propagate(
        self, op: _Operation, flows: list[Flow | None], outputs: list[Tensor]
    ) -> list[Flow | None]:
        """Return what the outputs are; raise _MixesError where tokens meet."""
        name, kinds, first = op.name, {flow.kind for flow in flows if flow is not None}, flows[0]
        picked = {flow.picked for flow in flows if flow is not None and flow.kind == "tokens"}
        if kinds == {"whole"}:
            return [Flow("whole")] * len(outputs)
        if name in _READS | _EXCHANGES or (name in _LOOKUPS and first is None) or len(picked) > 1:
            raise _MixesError
        if list_tensors(op.kwargs):  # which DTensor's rules may not see
            raise _MixesError
        if name == "index":
            return [self._pick(*op.args)]
        if name in _VIEWS and first is not None and first.kind == "tokens":
            return [first._replace(axis=self._find_viewed_axis(op.inputs[0], first, outputs[0]))]
        adds_zero = name in ("add", "sub") and flows == [Flow("sum")] and op.args[1] == 0  # as Python's sum()
        if adds_zero or name == "clone":  # for which DTensor would reduce the sum
            return flows
        results = _propagate_placements(op, flows)
        self.sums |= "sum" not in kinds and Flow("sum") in results
        are_picked = True in picked
        return [flow and flow._replace(picked=are_picked and flow.kind == "tokens") for flow in results]

    def _pick(self, x: Tensor, indices: list[Tensor | None]) -> Flow:
        """Choosing tokens by a mask over all of them: the chosen ones stay tokens."""
        mask, flow = indices[0], self._flow(x)
        if len(indices) > 1 or mask is None or mask.dtype is not torch.bool or flow is None:
            raise _MixesError
        if flow.axis != mask.ndim - 1 or self._flow(mask) != flow:
            raise _MixesError
        return Flow("tokens", 0, True)

    def _find_viewed_axis(self, x: Tensor, flow: Flow, out: Tensor) -> int:
        """Tokens stay the fastest part of a dimension, with as many inner entries as before."""
        size, inner = x.shape[flow.axis], x.shape[flow.axis + 1 :].numel()
        for axis in range(out.ndim):
            fits = out.shape[axis] == size if flow.picked else out.shape[axis] % self._tokens == 0
            if fits and out.shape[axis + 1 :].numel() == inner:
                return axis
        raise _MixesError


class ModuleFlow(TokenFlow):
    """Watch a module or hooks inside a model on a ring, whose attention is the ring's.

    What ds_ring returns to the module has an entry for each token of its operands; what is not known of it
    is taken as right.

    Args:
        tokens, samples: of this rank's part of the batch.
        frame: identity of the frame within which operators are watched.
    """

    def __init__(self, tokens: int, samples: int, frame: int | None) -> None:
        super().__init__(tokens)
        self._samples, self._frame = samples, frame

    def guess(self, x: Tensor) -> Flow | None:
        """Return what a tensor is by its shape alone; None for one that has no entry for each token."""
        tokens, merged = self._tokens, self._tokens * self._samples
        if isinstance(x, nn.Parameter) or x.ndim == 0:
            return None
        if x.ndim >= 2 and x.shape[1] == tokens:
            return Flow("tokens", 1)
        if x.ndim >= 4 and x.shape[2] == tokens:
            return Flow("tokens", 2)
        if x.shape[0] == merged or (x.ndim >= 3 and x.shape[0] == tokens):
            return Flow("tokens", 0)
        if x.ndim >= 3 and x.shape[-1] == tokens:
            return Flow("tokens", x.ndim - 1)
        is_picked = x.ndim == 2 and x.is_floating_point() and x.shape[0] != self._samples
        return Flow("tokens", 0, True) if is_picked else None  # tokens that a router has chosen

    def take(self, values: Iterable[Tensor], outer: ModuleFlow | None = None) -> list[Flow | None]:
        """Take tensors as given to the module, by what `outer` knows of them or by shape; return that."""
        knows = outer is not None and outer.fault is None
        flows = [outer._flow(x) if knows and outer is not None else self.guess(x) for x in values]
        for x, flow in zip(values, flows, strict=True):
            if flow is not None:
                self._put(x, flow)
        return flows

    def take_back(self, values: Iterable[Tensor], inner: ModuleFlow | None, inputs: Iterable[Tensor]) -> None:
        """Take the results of a module inside: by its own flow, or of ds_ring's and transformers' modules."""
        values, inputs = list(values), list(inputs)
        guesses = self._ring_results([self._flow(x) for x in inputs], inputs, values)
        for x, guessed in zip(values, guesses, strict=True):
            flow = inner._flow(x) if inner is not None and inner.fault is None else self._flow(x) or guessed
            if flow is not None:
                self._put(x, flow)

    def check(self, results: Iterable[Tensor], arguments: Iterable[Tensor]) -> None:
        """Look at what the module returns: entries by token come from its tokens; no sums."""
        inputs = {get_geometry(x) for x in arguments}
        for x in results:
            flow, guessed = self._flow(x), self.guess(x)
            if flow is not None and flow.kind == "sum":
                self._note("a sum over tokens", "its end")
            if flow is None and guessed is not None and not guessed.picked and get_geometry(x) not in inputs:
                self._note(f"a result {list(x.shape)} that is not known to be of tokens", "its end")

    def _ring_results(
        self, flows: list[Flow | None], inputs: list[Tensor], outputs: list[Tensor]
    ) -> list[Flow | None]:
        known = [(x, flow) for x, flow in zip(inputs, flows, strict=True) if flow and flow.kind == "tokens"]

        def find_flow(out: Tensor) -> Flow | None:
            for x, flow in known:
                if out.ndim > flow.axis and out.shape[flow.axis] == x.shape[flow.axis]:
                    return flow
            return self.guess(out) or (Flow("whole") if known else None)

        return [find_flow(out) for out in outputs]

    def _propagate(
        self, op: _Operation, flows: list[Flow | None], outputs: list[Tensor]
    ) -> list[Flow | None]:
        if any(flow is not None and flow.kind == "whole" for flow in flows):
            return [Flow("whole")] * len(outputs)
        try:
            return super()._propagate(op, flows, outputs)
        except _MixesError:
            merged = self._merged(op.inputs[0], flows[0], outputs[0]) if op.name in _VIEWS else None
            if merged is None:
                raise
            return [merged]

    def _merged(self, x: Tensor, flow: Flow | None, out: Tensor) -> Flow | None:
        """Return where tokens are after a view that joins them with what is behind, or parts them again.

        Each entry of a joined dimension is of one token, as those that were picked.
        """
        if flow is None:
            return None
        behind = x.shape[flow.axis + 1 :].numel()
        for place, size in enumerate(out.shape):
            inner = max(out.shape[place + 1 :].numel(), 1)
            if flow.picked and size == self._tokens and x.shape[flow.axis] % size == 0:
                return Flow("tokens", place)
            joined = behind // inner if behind % inner == 0 else 0
            if joined > 1 and size % joined == 0 and (size // joined) % self._tokens == 0:
                return Flow("tokens", place, True)
        return None


def list_tensors(tree: Any) -> list[Tensor]:
    """Return the tensors in a tree of arguments or results."""
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


def get_geometry(x: Tensor) -> Any:
    """Return what tells a tensor from all others that exist: its memory and its view of it."""
    storage = x.untyped_storage()
    return storage._cdata, x.storage_offset(), tuple(x.shape), x.stride()


@lru_cache(maxsize=4)
def _one_rank(device: str) -> DeviceMesh:
    """Return a mesh that knows of no process group: placements are followed, nothing is sent."""
    return DeviceMesh(device, [0], _init_backend=False, _rank=0)


def _propagate_placements(op: _Operation, flows: list[Flow | None]) -> list[Flow | None]:
    """Return what the outputs are by DTensor's rules; raise _MixesError where it would redistribute."""
    known = dict(zip(map(id, op.inputs), flows, strict=True))

    def describe(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        flow = known[id(x)]
        placement: Placement = Replicate()
        if flow is not None and flow.kind != "whole":
            placement = Shard(flow.axis) if flow.kind == "tokens" else Partial()
        shape = torch.Size(max(size, 1) for size in x.shape)  # a rank may have picked no token at all
        return DTensorSpec(
            _one_rank(x.device.type), (placement,), tensor_meta=TensorMeta(shape, x.stride(), x.dtype)
        )

    args, kwargs = tree_map(describe, (op.args, op.kwargs))
    schema = OpSchema(op.func, args, kwargs, RuntimeSchemaInfo(needs_pytree=True))
    try:
        sharding = _RULES.propagate_op_sharding_non_cached(schema)
    except Exception as error:  # an operator, or arguments, for which DTensor has no rule
        raise _MixesError from error
    if _placements(schema) != _placements(sharding.redistribute_schema or schema):
        raise _MixesError
    return [_read_flow(spec) for spec in tree_leaves(sharding.output_spec)]


def _placements(schema: OpSchema) -> list[Any]:
    leaves = tree_leaves((schema.args_schema, schema.kwargs_schema))
    return [spec.placements for spec in leaves if isinstance(spec, DTensorSpec)]


def _read_flow(spec: Any) -> Flow | None:
    placement = spec.placements[0] if isinstance(spec, DTensorSpec) else Replicate()
    if type(placement) is Shard:
        return Flow("tokens", placement.dim)
    if placement == Partial():
        return Flow("sum")
    if type(placement) is not Replicate:  # a part of a mean, a maximum, a norm
        raise _MixesError
    return None


def _find_caller(outermost: int | None = None) -> tuple[str, bool]:
    """Return the line that called an operator, as FILE:LINE (CODE), and whether ds_ring is in between.

    `outermost` is the identity of the frame at which the search ends; None: at a caller's `_look`.
    """
    frame: Any = sys._getframe(2)
    line, is_ours = "", False
    while frame is not None and id(frame) != outermost:
        module = frame.f_globals.get("__name__", "")
        if module == __name__ or module.startswith("torch"):
            frame = frame.f_back
            continue
        if frame.f_code.co_name == "_look" and module.startswith(_PACKAGE):
            break
        if module.startswith(_KNOWN):
            is_ours |= frame.f_code.co_name != "__torch_function__"  # which watches functions
        elif not line and not module.startswith("deepspeed"):
            code = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
            line = f"{frame.f_code.co_filename}:{frame.f_lineno} ({code})"
        frame = frame.f_back
    return line or "an unknown line", is_ours


def _is_called_by_user() -> bool:
    """Return whether a collective was called by the module, and not by DeepSpeed for its weights."""
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_code.co_name != "_look":
        module = frame.f_globals.get("__name__", "")
        is_engine = module.startswith("deepspeed") and not module.startswith("deepspeed.comm")
        is_ours = module.startswith(_PACKAGE) and frame.f_code.co_name != "__torch_function__"
        if module != __name__ and (is_engine or is_ours):
            return False
        frame = frame.f_back
    return True
