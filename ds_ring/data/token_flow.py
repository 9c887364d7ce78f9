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
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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


# Operators by name without overload, with a dimension argument: they mix tokens only along that dimension.
_ALONG = {
    "_softmax", "_log_softmax", "softmax", "log_softmax", "_safe_softmax", "cumsum", "cumprod",
    "logcumsumexp", "sort", "argsort", "topk", "flip", "roll", "split", "split_with_sizes", "chunk", "gather",
    "index_select", "glu", "scatter", "scatter_add",
}  # fmt: skip
_REDUCES = {
    "sum", "mean", "amax", "amin", "max", "min", "argmax", "argmin", "prod", "any", "all", "var", "std",
    "var_mean", "std_mean", "logsumexp", "linalg_vector_norm", "norm", "median", "nanmedian", "mode",
    "kthvalue", "nansum", "count_nonzero",
}  # fmt: skip
_SAME = {
    "clone", "_to_copy", "detach", "alias", "lift_fresh", "bernoulli", "uniform", "normal", "native_dropout",
    "zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "masked_fill", "to",
    "contiguous", "copy", "fill", "zero", "_fused_dropout", "polar",
}  # fmt: skip
_VIEWS = {"view", "_unsafe_view", "reshape", "_reshape_alias", "view_copy"}
_NORMS = {"native_layer_norm", "_fused_rms_norm", "rms_norm", "layer_norm"}
_LOSSES = {
    "nll_loss_forward", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss",
    "binary_cross_entropy", "binary_cross_entropy_with_logits", "kl_div",
}  # fmt: skip
_LINEAR = {"mul", "div", "add", "sub", "neg", "clone", "_to_copy", "detach", "alias", "to", "copy"}
_WRITES = {"copy", "index_put", "scatter", "scatter_add", "index_add", "index_copy"}
_READS = {"_local_scalar_dense", "equal", "is_nonzero", "item"}
_PACKAGE = __name__.partition(".")[0] + "."
_KNOWN = (_PACKAGE, "transformers.masking_utils")  # of whose masks the ring's attention knows


class TokenFlow(TorchDispatchMode):
    """Watch the operators inside the context, without those of `paused`.

    Attributes:
        found: the first operator that mixes tokens and the line of code that calls it; None so far.
        sums: whether a sum over tokens was taken.
        shifts: whether labels, which came shifted, were shifted again.
        sends: whether the module called collectives of torch.distributed by itself.
    """

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.found: str | None = None
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
            self._labels.add(_key(labels))

    def add_results(self, values: Iterable[Tensor], whole: Iterable[Tensor] = ()) -> None:
        """Record the results of an inner model: entries by token, its loss, and values for all tokens."""
        for x in values:
            self._results.add(_key(x))
            if x.ndim == 0:
                self._put(x, Flow("sum"))
        self.add_tokens(values)
        for x in whole:
            self._put(x, Flow("whole"))

    def check_inputs(self, values: Iterable[Any]) -> None:
        """Look at what an inner model is given: tensors of S tokens come from the batch."""
        for x in values:
            if isinstance(x, Tensor) and x.ndim >= 2 and x.shape[1] == self._tokens and self._flow(x) is None:
                self._note(f"a tensor {list(x.shape)} made for this rank's tokens", _caller(self._frame)[0])

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
            if flow is None and x.ndim > 0 and _key(x) not in self._results:
                self._note(f"a result {list(x.shape)} that is not known to be of tokens", "its end")
            if flow is not None and flow.kind == "sum" and (x.numel() > 1 or (self.sums and not divided)):
                self._note("a sum over tokens", "its end")

    def _put(self, x: Tensor, flow: Flow) -> None:
        self._flows[_key(x)] = flow, x.untyped_storage()

    def _flow(self, x: Tensor) -> Flow | None:
        found = self._flows.get(_key(x))
        return None if found is None else found[0]

    def _note(self, what: str, where: str) -> None:
        self.found = self.found or f"{what} at {where}"

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.found is not None:
            result = func(*args, **kwargs)
            is_label = func.overloadpacket is torch.ops.aten.slice and _key(args[0]) in self._labels
            self.shifts |= is_label and result.shape != args[0].shape
            return result
        if func.namespace in ("c10d", "_c10d_functional"):
            self.sends |= _is_of_user()
            return func(*args, **kwargs)
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            with self:  # in inference mode these arrive whole
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        try:
            result = func(*args, **kwargs)
        except (IndexError, RuntimeError):  # an index, or a tensor, of the whole sequence
            line, is_ours = _caller(self._frame)
            tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
            if not is_ours and any(self._flow(x) is not None for x in tensors):
                self._note(f"{func.overloadpacket.__name__} over tokens", line)
            raise
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        flows = [self._flow(x) for x in inputs]
        outputs = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        line, is_ours = _caller(self._frame)
        found: list[Flow | None] = []
        if is_ours:
            found = self._of_ring(flows, inputs, outputs)
        elif any(flow is not None for flow in flows):
            try:
                found = self._rule(func, args, kwargs, list(zip(inputs, flows, strict=True)), outputs)
            except _MixesError:
                self._note(f"{func.overloadpacket.__name__} over tokens", line)
        for x, flow in zip(outputs, found, strict=False):
            if flow is not None:
                self._put(x, flow)
        return result

    def _of_ring(
        self, flows: list[Flow | None], inputs: list[Tensor], outputs: list[Tensor]
    ) -> list[Flow | None]:
        """Return what results of ds_ring are: tokens received from other ranks have no source tensor here."""
        return [Flow("whole")] * len(outputs)

    def _rule(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        inputs: list[tuple[Tensor, Flow | None]],
        outputs: list[Tensor],
    ) -> list[Flow | None]:
        """Return what the outputs are; raise _MixesError where tokens meet."""
        name = func.overloadpacket.__name__
        name = name[:-1] if name.endswith("_") else name
        given = _bind(func, args, kwargs)
        flows = [flow for _, flow in inputs if flow is not None]
        kinds = {flow.kind for flow in flows}
        if kinds == {"whole"}:
            return [Flow("whole")] * len(outputs)
        if "sum" in kinds:
            return self._of_sums(name, kinds, inputs, outputs)
        if name in _READS or (name in _WRITES and inputs[0][1] is None):
            raise _MixesError
        if func is torch.ops.aten.index.Tensor or name == "masked_select":
            return [self._picked(name, given, inputs)]
        is_alike = torch.Tag.pointwise in func.tags or name in _SAME
        if is_alike:
            return [self._pointwise(inputs, out) for out in outputs]
        if name in _LOSSES:
            return self._loss(given, inputs, outputs)
        if name in ("mm", "addmm", "bmm", "baddbmm", "mv"):
            return [_product(name, inputs)]
        if name == "embedding":
            return [Flow("tokens", flows[0].axis, flows[0].picked) if inputs[0][1] is None else _mixes()]
        if name in ("cat", "stack"):
            return [self._joined(name, given, inputs)]
        x, flow = inputs[0]
        if flow is None or any(
            other is not None and other.axis + y.ndim != flow.axis + x.ndim for y, other in inputs
        ):
            raise _MixesError
        axis = flow.axis
        if name in _VIEWS:
            return [flow._replace(axis=self._axis_of_view(x, axis, outputs[0], flow.picked))]
        if name in ("view_as_complex", "view_as_real"):
            return [flow if axis < x.ndim - (name == "view_as_complex") else _mixes()]
        if name in _NORMS:
            return [flow if axis < x.ndim - len(given["normalized_shape"]) else _mixes()] * len(outputs)
        dims = _dims(given, x.ndim)
        if name in _ALONG:
            return [flow if axis not in dims else _mixes()] * len(outputs)
        if name in _REDUCES:
            return self._reduced(name, flow, dims, given, x, outputs)
        if name == "squeeze":
            gone = {dim for dim in dims or range(x.ndim) if x.shape[dim] == 1}
            return [
                flow._replace(axis=axis - sum(dim < axis for dim in gone)) if axis not in gone else _mixes()
            ]
        moved = _moved(name, given, x.ndim, axis, dims)
        if moved is None and name == "slice" and x.shape == outputs[0].shape:
            moved = axis
        if moved is None:
            self.shifts |= name == "slice" and _key(x) in self._labels
            raise _MixesError
        return [flow._replace(axis=moved)] * len(outputs)

    def _of_sums(
        self, name: str, kinds: set[FlowKind], inputs: list[tuple[Tensor, Flow | None]], outputs: list[Tensor]
    ) -> list[Flow | None]:
        """Sums over local tokens add up over the ranks as long as they pass through linear operators."""
        are_sums = [flow is not None and flow.kind == "sum" for _, flow in inputs]
        divides = name == "div" and not are_sums[0]
        if (
            "tokens" in kinds
            or name not in (_LINEAR | _VIEWS)
            or divides
            or (name in ("mul", "div") and sum(are_sums) > 1)
        ):
            raise _MixesError
        return [Flow("sum")] * len(outputs)

    def _pointwise(self, inputs: list[tuple[Tensor, Flow | None]], out: Tensor) -> Flow:
        """All that has one entry a token must have it in one place; nothing else may have entries there."""
        places = {(flow.axis - x.ndim, flow.picked) for x, flow in inputs if flow and flow.kind == "tokens"}
        if len(places) != 1:
            raise _MixesError
        place, picked = places.pop()
        for x, flow in inputs:
            has_entries = -place <= x.ndim and x.shape[place] != 1
            if (flow is None or flow.kind == "whole") and has_entries:
                raise _MixesError  # positions of its own: arange, say
        return Flow("tokens", out.ndim + place, picked)

    def _picked(self, name: str, given: dict[str, Any], inputs: list[tuple[Tensor, Flow | None]]) -> Flow:
        """Choosing tokens by a mask over all of them: the chosen ones stay tokens."""
        mask = given["mask"] if name == "masked_select" else None
        chosen = [mask] if mask is not None else list(given["indices"])
        flow, masked = self._flow(given["self"]), None
        if len(chosen) == 1 and isinstance(chosen[0], Tensor):
            masked = self._flow(chosen[0])
        is_mask = masked is not None and masked.axis == chosen[0].ndim - 1 and chosen[0].dtype is torch.bool
        if not is_mask or flow is None or masked is None or flow.axis != masked.axis or mask is not None:
            raise _MixesError
        return Flow("tokens", 0, True)

    def _loss(
        self, given: dict[str, Any], inputs: list[tuple[Tensor, Flow | None]], outputs: list[Tensor]
    ) -> list[Flow | None]:
        flows = {flow for _, flow in inputs if flow is not None}
        tensors = [given["self"], given["target"]]
        if len(flows) != 1 or any(self._flow(x) is None for x in tensors) or given["reduction"] == 1:
            raise _MixesError  # a mean over this rank's tokens
        if given["reduction"] == 0:
            return [flows.pop(), *[Flow("sum")] * (len(outputs) - 1)]
        self.sums = True
        return [Flow("sum")] * len(outputs)

    def _joined(self, name: str, given: dict[str, Any], inputs: list[tuple[Tensor, Flow | None]]) -> Flow:
        flows, first = {flow for _, flow in inputs}, inputs[0]
        flow = first[1]
        if len(flows) != 1 or flow is None:
            raise _MixesError
        dim = given.get("dim", 0) % (first[0].ndim + (name == "stack"))
        if name == "cat":
            return flow if dim != flow.axis else _mixes()
        return flow._replace(axis=flow.axis + (dim <= flow.axis))

    def _axis_of_view(self, x: Tensor, axis: int, out: Tensor, picked: bool) -> int:
        """Tokens stay the fastest part of a dimension, with as many inner entries as before."""
        behind = x.shape[axis + 1 :].numel()
        for place in range(out.ndim):
            size = out.shape[place]
            fits = size == x.shape[axis] if picked else size % self._tokens == 0
            if fits and out.shape[place + 1 :].numel() == behind:
                return place
        raise _MixesError

    def _reduced(
        self,
        name: str,
        flow: Flow,
        dims: set[int],
        given: dict[str, Any],
        x: Tensor,
        outputs: list[Tensor],
    ) -> list[Flow | None]:
        dims = dims or set(range(x.ndim))
        if flow.axis in dims:
            if name != "sum":
                raise _MixesError
            self.sums = True
            return [Flow("sum")] * len(outputs)
        kept = bool(given.get("keepdim"))
        return [flow._replace(axis=flow.axis - (0 if kept else sum(d < flow.axis for d in dims)))] * len(
            outputs
        )


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
        knows = outer is not None and outer.found is None
        flows = [outer._flow(x) if knows and outer is not None else self.guess(x) for x in values]
        for x, flow in zip(values, flows, strict=True):
            if flow is not None:
                self._put(x, flow)
        return flows

    def take_back(self, values: Iterable[Tensor], inner: ModuleFlow | None, given: Iterable[Tensor]) -> None:
        """Take the results of a module inside: by its own flow, or of ds_ring's and transformers' modules."""
        values, given = list(values), list(given)
        guesses = self._of_ring([self._flow(x) for x in given], given, values)
        for x, guessed in zip(values, guesses, strict=True):
            flow = inner._flow(x) if inner is not None and inner.found is None else self._flow(x) or guessed
            if flow is not None:
                self._put(x, flow)

    def check(self, results: Iterable[Tensor], given: Iterable[Tensor]) -> None:
        """Look at what the module returns: entries by token come from its tokens; no sums."""
        inputs = {_key(x) for x in given}
        for x in results:
            flow, guessed = self._flow(x), self.guess(x)
            if flow is not None and flow.kind == "sum":
                self._note("a sum over tokens", "its end")
            if flow is None and guessed is not None and not guessed.picked and _key(x) not in inputs:
                self._note(f"a result {list(x.shape)} that is not known to be of tokens", "its end")

    def _of_ring(
        self, flows: list[Flow | None], inputs: list[Tensor], outputs: list[Tensor]
    ) -> list[Flow | None]:
        known = [(x, flow) for x, flow in zip(inputs, flows, strict=True) if flow and flow.kind == "tokens"]

        def of(out: Tensor) -> Flow | None:
            for x, flow in known:
                if out.ndim > flow.axis and out.shape[flow.axis] == x.shape[flow.axis]:
                    return flow
            return self.guess(out) or (Flow("whole") if known else None)

        return [of(out) for out in outputs]

    def _rule(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        inputs: list[tuple[Tensor, Flow | None]],
        outputs: list[Tensor],
    ) -> list[Flow | None]:
        if any(flow is not None and flow.kind == "whole" for _, flow in inputs):
            return [Flow("whole")] * len(outputs)
        try:
            return super()._rule(func, args, kwargs, inputs, outputs)
        except _MixesError:
            (x, flow), *_ = inputs
            name = func.overloadpacket.__name__
            if name in _VIEWS and flow is not None and (found := self._merged(x, flow, outputs[0])):
                return [found]
            raise

    def _merged(self, x: Tensor, flow: Flow, out: Tensor) -> Flow | None:
        """Return where tokens are after a view that joins them with what is behind, or parts them again.

        Each entry of a joined dimension is of one token, as those that were picked.
        """
        behind = x.shape[flow.axis + 1 :].numel()
        for place, size in enumerate(out.shape):
            inner = max(out.shape[place + 1 :].numel(), 1)
            if flow.picked and size == self._tokens and x.shape[flow.axis] % size == 0:
                return Flow("tokens", place)
            joined = behind // inner if behind % inner == 0 else 0
            if joined > 1 and size % joined == 0 and (size // joined) % self._tokens == 0:
                return Flow("tokens", place, True)
        return None


def _mixes() -> Any:
    raise _MixesError


def _key(x: Tensor) -> Any:
    storage = x.untyped_storage()
    return storage._cdata, x.storage_offset(), tuple(x.shape), x.stride()


def _bind(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of an operator by name, with its defaults."""
    given = {one.name: one.default_value for one in func._schema.arguments if one.has_default_value()}
    names = [one.name for one in func._schema.arguments]
    return given | dict(zip(names, args, strict=False)) | kwargs


def _dims(given: dict[str, Any], ndim: int) -> set[int]:
    dims = given.get("dim", given.get("dims"))
    if dims is None:
        return set()
    return {dim % max(ndim, 1) for dim in (dims if isinstance(dims, (list, tuple)) else [dims])}


def _product(name: str, inputs: list[tuple[Tensor, Flow | None]]) -> Flow:
    """Rows of the left matrix, or columns of the right one, that are tokens stay tokens."""
    (a, of_a), (b, of_b) = inputs[-2:]
    if len(inputs) > 2 and inputs[0][1] is not None:  # what addmm adds
        raise _MixesError
    rows, columns = a.ndim - 2, b.ndim - 1
    if of_a is not None and of_b is None and of_a.axis == rows:
        return of_a
    if name != "mv" and of_b is not None and of_a is None and of_b.axis == columns:
        return of_b
    same_samples = a.ndim == 3 and of_a is not None and of_a == of_b and of_a.axis == 0
    if same_samples and of_a is not None:
        return of_a
    raise _MixesError


def _moved(name: str, given: dict[str, Any], ndim: int, axis: int, dims: set[int]) -> int | None:
    """Return where a dimension is after an operator that moves or takes other ones; None if it takes this."""
    if name == "permute":
        return [dim % ndim for dim in given["dims"]].index(axis)
    if name in ("transpose", "t"):
        swapped = {0, 1} if name == "t" else {given["dim0"] % ndim, given["dim1"] % ndim}
        if ndim < 2 or axis not in swapped:
            return axis
        return next(iter(swapped - {axis}), axis)
    if name == "unsqueeze":
        return axis + (given["dim"] % (ndim + 1) <= axis)
    if name == "expand":
        return axis + len(given["size"]) - ndim
    if name == "repeat":
        before = len(given["repeats"]) - ndim
        return axis + before if given["repeats"][axis + before] == 1 else None
    if axis in dims:
        return None
    if name in ("select", "unbind"):
        return axis - sum(dim < axis for dim in dims or {0}) if (dims or {0}) != {axis} else None
    if name == "slice":
        return axis
    return None


def _caller(outermost: int | None = None) -> tuple[str, bool]:
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


def _is_of_user() -> bool:
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
