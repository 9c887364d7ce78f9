"""Run a module around a transformers model as on one process, where it reads across tokens.

The inner model is on the ring and returns hidden states of this rank's tokens. A head on each token is right
there. A last token, a mean, a maximum, a softmax over tokens would be this rank's: in the first forward pass
`TokenFlow` detects whether the module computes one. Then the inner model stays on the ring, and the module's
own code gets whole sequences ([Note: whole wrappers]). Owns this decision and both kinds of calls.

Shapes: B samples, T global tokens, S local tokens.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from ds_ring.data.batch import SHARDING, cache_in, pad_value
from ds_ring.data.batch_sharding import BatchSharding
from ds_ring.data.engine import ENGINE, MODULE
from ds_ring.data.loss import ITEMS
from ds_ring.data.session import RingSession
from ds_ring.data.token_flow import TokenFlow
from ds_ring.errors import RingConfigError, RingShapeError
from ds_ring.models.families import pools_the_last_token
from ds_ring.models.model import MODEL
from ds_ring.models.model_adapter import ModelAdapter
from ds_ring.models.variant import find_forward_home
from ds_ring.ops.shard import gather_sequence, shard_sequence
from ds_ring.patches import apply, patch

log = logging.getLogger(__name__)

_module_patch = partial(
    patch, feature="wrapper", when="a module of one's own has a transformers model inside",
    reason="a module that reads across tokens beside its transformers model gets whole sequences",
)  # fmt: skip
_before_module = _module_patch(MODULE, stage="before_forward")
_after_module = _module_patch(MODULE, stage="after_forward", options=("always_call",))
_model_patch = partial(patch, MODEL, feature="wrapper", when="a module of one's own is around the model")
_before_model = _model_patch(
    stage="before_forward", options=("prepend",),
    reason="cuts whole sequences, if the module around the model reads across tokens",
)  # fmt: skip
_after_model = _model_patch(
    stage="after_forward", options=("always_call",),
    reason="gathers the outputs, if the module around the model reads across tokens",
)  # fmt: skip

_MASK = "attention_mask"
_TOKENS = ("input_ids", "inputs_embeds", "position_ids")
_INSTEAD = (
    "let the module return a result for each token, or call engine.ring.gather on what the inner model"
    " returns and compute from that"
)
_RUNS_WHOLE = (
    "%s reads across tokens: %s. From now on what it computes beside its transformers model runs on whole"
    " sequences on every rank, as on one process; memory for these results grows with all %d tokens. A loss"
    " of tokens does without: return logits, and call engine.ring.loss(logits, batch)"
)
_SENDS = (
    "%s computes from this rank's tokens (%s), and calls torch.distributed itself: whether its results are"
    ' those of whole sequences is not known; "verify_first_batch": true compares them'
)

Path = tuple[Any, ...]


@dataclass
class _WholeCall:
    """A call of the module with whole sequences."""

    sharding: BatchSharding
    args: tuple[Any, ...]  # of local tokens, and by name
    kwargs: dict[str, Any]
    local_of: dict[int, tuple[Tensor, Tensor]]  # by identity of a whole tensor, that tensor and its local one


# [Note: whole wrappers]
# The module gets the batch's tensors by token gathered, [B, T, ...]. A hook before the inner model cuts them
# again, and a hook after it gathers its results, so the module's own code sees the tensors of one process.
# Every rank computes the same; `gather_sequence` sums the gradients of all ranks of a sequence, and DeepSpeed
# averages over the world, so that a loss of whole sequences has the right gradient as it is, and the module's
# parameters as well. Results of the module for each token are cut to this rank's: their gradient is that of a
# loss of local tokens. Which dimension that is shows by comparison with a pass over local tokens: it has S
# entries there and T here. `num_items_in_batch` grows by the ranks of a sequence, since each of them now sums
# over all tokens.
class WrappedModel:
    """Call a module around transformers models, on local tokens or on whole sequences."""

    def __init__(
        self, module: nn.Module, session: RingSession, inner: list[PreTrainedModel], is_attached: bool = False
    ) -> None:
        self._is_attached = is_attached  # the module itself has the sharding, which its code may not pass on
        self._name, self._session = type(module).__name__, session
        self._whole: dict[bool, bool] = {}  # by training mode, whether it reads across tokens
        self._shapes: dict[Path, Tensor] = {}  # its results for local tokens, by place in the output
        self._axes: dict[Path, int | None] = {}  # the dimension of tokens, by place in the output
        self._flow: TokenFlow | None = None
        self._call: _WholeCall | None = None
        self._parameters = inspect.signature(module.forward).parameters
        mask = self._parameters.get(_MASK)
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in self._parameters.values())
        self._takes_mask, self._needs_mask = takes_all or mask is not None, False
        if mask is not None:
            self._needs_mask = mask.default is mask.empty
        if self._takes_mask:
            session.needs.real_tokens = True

        # Functions, since a copy of the model copies bound methods and all that they hold.
        @_before_module
        def before(*call: Any) -> Any:
            return self._before(*call)

        @_after_module
        def after(*call: Any) -> Any:
            return self._after(*call)

        @_before_model
        def enter(*call: Any) -> Any:
            return self._enter(*call)

        @_after_model
        def leave(*call: Any) -> Any:
            return self._leave(*call)

        apply(before, after, session=session, module=module)
        for model in inner:
            apply(enter, leave, session=session, model=model)

    @_module_patch(ENGINE, stage="before_forward")
    def before_forward(
        self, engine: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Give the module the batch's padding mask; find out here what a compiled one reads."""
        if self._session.batches.is_off or self._has_parts():
            return None
        kwargs = self._add_mask(args, kwargs)
        if engine.is_compiled and engine.module.training not in self._whole:
            with self._session.off():  # the attention of some models runs in compiled code only
                flow, _ = self._look(engine.module, args, kwargs)
            if flow.fault is not None:
                raise RingConfigError(
                    f"{self._name} reads across the tokens of a sequence, of which a rank has a part:"
                    f" {flow.fault}; do not compile it, or {_INSTEAD}"
                )
            self._whole[engine.module.training] = False
        return args, kwargs

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.compiler.is_compiling() or self._flow is not None or self._call is not None:
            return None
        if self._session.batches.is_off or cache_in(kwargs) is not None or self._has_parts():
            return None
        kwargs = self._add_mask(args, kwargs)
        if module.training not in self._whole:
            flow, self._shapes = self._look(module, args, kwargs)
            self._whole[module.training] = self._decide(flow)
        return self._widened(args, kwargs) if self._whole[module.training] else (args, kwargs)

    def _has_parts(self) -> bool:
        """Return whether the batch has tensors of which the module expects a rank's part."""
        return bool(getattr(self._session.batches.current.whole, "for_modules", False))

    def _add_mask(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Add the attention_mask that `shard_batch` took out; inner models do not get it."""
        if not self._takes_mask or len(args) > 1 or kwargs.get(_MASK) is not None:
            return kwargs
        sharding = self._session.batches.current
        mask_BS = sharding.real_tokens
        rows = next((x for x in (*kwargs.values(), *args) if isinstance(x, Tensor) and x.ndim >= 2), None)
        if mask_BS is None and self._needs_mask and rows is not None:
            slots_S = sharding.with_slots(rows.device).slots
            assert slots_S is not None
            mask_BS = (slots_S >= 0).long().expand(rows.shape[0], -1)
        if mask_BS is None:
            return kwargs
        self._session.batches.masks = [mask_BS]
        return kwargs | {_MASK: mask_BS}

    def _look(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[TokenFlow, dict[Path, Tensor]]:
        """Run the module on local tokens, and record whether it mixes them; return its results, too."""
        device, output = self._session.device, None
        flow = TokenFlow(self._session.batches.current.local_tokens)
        flow.add_tokens((*args, *kwargs.values()), kwargs.get("labels"))
        self._flow = flow
        try:
            with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []), flow:
                output = module._call_impl(*args, **kwargs)  # uncompiled
        except Exception as error:
            if isinstance(error, IndexError):
                flow.fault = flow.fault or f"an index beyond this rank's tokens ({error})"
            if flow.fault is None:
                raise  # else a mask of another length, say: on whole sequences it fits
        finally:
            self._flow = None
        results = dict(_tensors(output))
        flow.check_results(results.values(), kwargs.get(ITEMS) is not None)
        return flow, results

    def _decide(self, flow: TokenFlow) -> bool:
        """Return whether the module has to run on whole sequences.

        Raises:
            RingConfigError, RingShapeError: it has to, and cannot.
        """
        if flow.fault is None:
            return False
        session, sharding = self._session, self._session.batches.current
        if flow.shifts:
            raise RingShapeError.wrong(
                self._name, "shift_labels to be used as they are", f"a shift ({flow.fault})", "leave it out"
            )
        if flow.sends:
            if session.run_mesh.global_rank == 0:
                log.warning(_SENDS, self._name, flow.fault)
            return False
        reason = ""
        if sharding.mesh.sequence_size != session.run_mesh.sequence_size:
            reason = (
                f"the {sharding.layout.tokens} tokens of this batch are on fewer ranks than the ring has; set"
                ' "min_sequence_length": 0 and "dynamic_ring": false in the "ring_attention" section'
            )
        elif sharding.encoder is not None:
            reason = "of an encoder-decoder's two sequences it is not known which one"
        elif session.gradient_divisor != _world_size():
            reason = '"gradient_allreduce_op": "sum" would count its loss once for every rank; leave that out'
        if reason:
            raise RingConfigError(
                f"{self._name} reads across the tokens of a sequence, of which a rank has a part:"
                f" {flow.fault}; {reason}, or {_INSTEAD}"
            )
        if session.run_mesh.global_rank == 0:
            log.warning(_RUNS_WHOLE, self._name, flow.fault, sharding.layout.tokens)
        return True

    def _widened(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of whole sequences. Collective."""
        sharding, local_of = self._session.batches.current, dict[int, tuple[Tensor, Tensor]]()

        def whole(name: str, x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            result = x
            if name == ITEMS and x.ndim == 0:
                result = x * sharding.mesh.sequence_size
            elif x.ndim >= 2 and x.shape[1] == sharding.local_tokens:
                result = _gathered(x, sharding)
            local_of[id(result)] = result, x
            if any(x is mask for mask in self._session.batches.masks):
                self._session.batches.masks.append(result)
            return result

        names = [*self._parameters, *[""] * len(args)]
        self._call = _WholeCall(sharding, args, kwargs, local_of)
        return (
            tuple(whole(name, x) for name, x in zip(names, args, strict=False)),
            {name: whole(name, x) for name, x in kwargs.items()},
        )

    def _after(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        """Cut what has an entry for each token to this rank's."""
        call = self._call
        if call is None or self._flow is not None:
            return None
        self._call = None
        if output is None:  # the call failed
            return None
        results, sharding = dict(_tensors(output)), call.sharding
        new = results.keys() - self._axes.keys()
        if new - self._shapes.keys() and self._axes:  # another kind of output than before
            _, self._shapes = self._look(module, call.args, call.kwargs)
        self._axes |= {
            path: _find_token_axis(self._shapes.get(path), results[path], sharding) for path in new
        }

        def cut(path: Path, x: Tensor) -> Tensor:
            axis = self._axes[path]
            return x if axis is None else shard_sequence(x, sharding.layout, mesh=sharding.mesh, dim=axis)

        return _map_tensors(output, cut)

    # Before and after an inner model.

    def _enter(
        self, model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        bound = inspect.signature(model.forward).bind_partial(*args, **kwargs)
        named = dict(bound.arguments)
        named |= named.pop("kwargs", {}) if "kwargs" not in kwargs else {}
        mask = named.get(_MASK)
        if isinstance(mask, Tensor) and self._equals_batch_mask(mask):
            named[_MASK] = None
        if self._is_attached:
            named.setdefault(SHARDING, self._session.batches.current)
        if self._flow is not None:
            self._flow.check_inputs(named.values())
            self._flow.pause()
        if self._call is not None:
            named = {name: self._cut(type(model).__name__, name, x) for name, x in named.items()}
        return (), named

    def _equals_batch_mask(self, mask: Tensor) -> bool:
        """Return whether a mask equals the batch's own, which `shard_batch` has checked."""
        masks = self._session.batches.masks
        return any(mask is known for known in masks) or (
            self._call is not None
            and any(mask.shape == known.shape and torch.equal(mask, known.to(mask)) for known in masks)
        )

    def _cut(self, model: str, name: str, x: Any) -> Any:
        assert self._call is not None
        sharding = self._call.sharding
        if not isinstance(x, Tensor):
            return x
        if id(x) in self._call.local_of:
            return self._call.local_of[id(x)][1]
        tokens = sharding.layout.tokens
        if x.ndim >= 2 and x.shape[1] == tokens:
            return shard_sequence(x, sharding.layout, mesh=sharding.mesh, dim=1, pad_value=pad_value(name))
        if name in _TOKENS:
            raise RingShapeError(
                f"{name}: expected the batch's {tokens} tokens from {self._name}, got {list(x.shape)}"
            )
        return x

    def _leave(self, model: PreTrainedModel, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        is_pooled = pools_the_last_token(model)
        if self._flow is not None:
            self._flow.resume()
            results = dict(_tensors(output))
            pooled = [x for path, x in results.items() if is_pooled and path == ("logits",)]
            self._flow.add_results(list(results.values()), pooled)
        if self._call is None or output is None:  # None: the call failed
            return None
        sharding = self._call.sharding

        def whole(path: Path, x: Tensor) -> Tensor:
            by_token = x.ndim >= 2 and x.shape[1] == sharding.local_tokens
            if not by_token or (is_pooled and path == ("logits",)) or path[:1] == ("image_hidden_states",):
                return x
            return _gathered(x, sharding)

        return _map_tensors(output, whole)


def wrap_model(module: nn.Module, session: RingSession, attached: list[ModelAdapter]) -> WrappedModel | None:
    """Return what calls a module that is no transformers model itself but has some inside; None without."""
    models, is_attached = [adapter.model for adapter in attached], False
    if not models or session.run_mesh.sequence_size == 1:
        return None
    if module in models:  # a class of the user's around a base model of transformers
        if find_forward_home(module).startswith("transformers."):
            return None
        parts = [
            part for part in module.modules() if isinstance(part, PreTrainedModel) and part is not module
        ]
        inside = {id(part) for outer in parts for part in outer.modules() if part is not outer}
        models = [model for model in parts if id(model) not in inside]
        if not models:
            return None
        is_attached = not attached[0].rewritten
    return WrappedModel(module, session, models, is_attached)


def _gathered(x: Tensor, sharding: BatchSharding) -> Tensor:
    sent = x.to(torch.uint8) if x.dtype is torch.bool else x  # no message has that type
    return gather_sequence(sent, sharding.layout, mesh=sharding.mesh, dim=1).to(x.dtype)


def _find_token_axis(local: Tensor | None, whole: Tensor, sharding: BatchSharding) -> int | None:
    """Return the one dimension with S entries of local tokens and T of all; None for another result."""
    if local is None or local.ndim != whole.ndim:
        return None
    differ = [axis for axis in range(local.ndim) if local.shape[axis] != whole.shape[axis]]
    if len(differ) != 1 or whole.shape[differ[0]] != sharding.layout.tokens:
        return None
    return differ[0] if local.shape[differ[0]] == sharding.local_tokens else None


def _tensors(value: Any, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """Yield the tensors in an output, each with its place."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for name, part in value.items():
            yield from _tensors(part, (*path, name))
    elif isinstance(value, (list, tuple)):
        for number, part in enumerate(value):
            yield from _tensors(part, (*path, number))
    elif is_dataclass(value) and not isinstance(value, type):
        for attribute in fields(value):
            yield from _tensors(getattr(value, attribute.name), (*path, attribute.name))


def _map_tensors(value: Any, change: Callable[[Path, Tensor], Tensor], path: Path = ()) -> Any:
    """Return an output with other tensors."""
    if isinstance(value, Tensor):
        return change(path, value)
    if isinstance(value, Mapping):
        named = {name: _map_tensors(part, change, (*path, name)) for name, part in value.items()}
        return type(value)(**named) if type(value) is not dict else named
    if isinstance(value, (list, tuple)):
        parts = [_map_tensors(part, change, (*path, number)) for number, part in enumerate(value)]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if is_dataclass(value) and not isinstance(value, type):
        named = {
            attribute.name: _map_tensors(getattr(value, attribute.name), change, (*path, attribute.name))
            for attribute in fields(value)
        }
        return replace(value, **named)
    return value


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1
