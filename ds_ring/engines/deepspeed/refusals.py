"""Refuse features that would silently train another model with a ring.

Owns the refusals of DeepSpeed's features that the JSON or the model show before training starts: another
gradient scale, other samples on the ranks of a ring, groups of ranks that the ring uses otherwise. What
DeepSpeed 0.19.8 refuses by itself (sparse_attention, compression_training, progressive_layer_drop, MiCS, ...)
is left to it; `tests/dist/test_deepspeed_features.py` has the whole table.

Owns as well the check that a model uses the ring, in its first forward pass: that a ring pass ran, and that
plain attention over exactly this rank's tokens was not called. Every rank of a sequence runs the same model
on the same sharding, so all of them raise. What a transformers model may ask for is checks.py's.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, NoReturn

import torch
from deepspeed.pipe import PipelineModule
from torch.overrides import TorchFunctionMode

from ds_ring.compat import get_imported
from ds_ring.compat.deepspeed import SEES_DIRECT_BACKWARD
from ds_ring.data.batch_sharding import BatchSharding
from ds_ring.data.engine import (
    DEEPSPEED,
    ENGINE,
    MODULE,
    drops_layers,
)
from ds_ring.data.loss import check_loss
from ds_ring.data.session import RingSession
from ds_ring.errors import RingConfigError, RingShapeError
from ds_ring.masks.catalog import Causal
from ds_ring.ops.passes import get_forward_passes
from ds_ring.patches import applied, patch

log = logging.getLogger(__name__)

_SAMPLER = "DeepSpeed's sampler then gives every rank of a ring other samples: order the data set yourself"
# by dotted key: the most that a number may be (None: it must not be true), what would happen and what to do
_REFUSED: dict[str, tuple[int | None, str]] = {
    "curriculum_learning.enabled": (None, _SAMPLER),
    "data_efficiency.enabled": (None, f"{_SAMPLER} (random-LTD drops tokens by a rank's own choice)"),
    "tensor_parallel.autotp_size": (
        1,
        "AutoTP's ranks need the same tokens, and neighbouring ranks of a ring have different ones: remove"
        " the section, shard parameters with ZeRO 3 and heads with ulysses_size",
    ),
    "expert_parallel.autoep_size": (
        1,
        "experts are then reduced over other groups of ranks than the ring's: remove the section",
    ),
    "hybrid_engine.enabled": (
        None,
        "its generation replaces the layers that attend on the ring: remove the section, and generate"
        " inside `with engine.ring.off():`",
    ),
}
_WHAT_TO_DO = (
    'say engine.compile(backend="ds_ring") before the first batch (it rewrites scaled_dot_product_attention),'
    " call engine.ring.attention()(q, k, v) or ds_ring.RingAttention in the module, or use a transformers"
    ' model, which gets the ring\'s attention by itself unless the section says "attention": "as_is"'
)
_POSITIONS = (
    "%s was called without the batch's position_ids: if it numbers tokens by itself, it numbers the %d of"
    ' each rank from 0 on, of %d; give what uses positions batch["position_ids"], which are global'
)
_OWN_LOSS = (
    "%s returned a loss of its own without num_items_in_batch: a mean over a rank's labels is weighed wrong"
    " where ranks have unequally many; return logits, and call engine.ring.loss(logits, batch)"
)
_TRAINS_OFF = (
    "engine.ring.off(): expected a forward pass that evaluates, got one in training mode with gradients: each"
    " rank would train on its own tokens only; leave the block first, or call engine.eval()"
)
_PLAIN = "scaled_dot_product_attention", "flex_attention"
_SOFTMAX = "softmax", "_softmax"
_MULTIHEAD = "multi_head_attention_forward"  # of nn.MultiheadAttention; its inner calls are not seen


def refuse_features(config: Mapping[str, Any], model: torch.nn.Module) -> None:
    """Refuse what DeepSpeed would do otherwise than the ring takes it to do, before it has the model."""
    for name, (most, why) in _REFUSED.items():
        section, _, key = name.partition(".")
        value = _section(config, section).get(key)
        if isinstance(value, (int, float)) and value > (most or 0):
            expected = "it not to be set" if most is None else f"at most {most}"
            raise RingConfigError(f"{name}: expected {expected}, got {value}; {why}")
    passes = _section(config, "compile").get("passes") or ()
    if "autosp" in passes:
        raise RingConfigError(f'compile.passes: expected no "autosp", got {passes}; it would shard twice')
    factor = config.get("gradient_predivide_factor", 1.0)
    if _section(config, "zero_optimization").get("stage") == 3 and factor != 1.0:
        raise RingConfigError.wrong("gradient_predivide_factor", "1.0 at ZeRO 3", factor, "remove the key")
    for name, why in _model_features(model):
        raise RingConfigError(f"model: expected a plain module, got {name}; {why}")


def divides_twice(engine: Any) -> bool:
    """Return whether DeepSpeed divides the gradients of a direct `loss.backward()` twice by its steps."""
    # With or without a ring. ZeRO 0 refuses such a call, ZeRO 3 and `engine.backward(loss)` are right.
    return engine.gradient_accumulation_steps() > 1 and engine.zero_optimization_stage() in (1, 2)


@patch(
    ENGINE, "_backward_prologue", stage="around_backward", feature="direct_backward",
    available=SEES_DIRECT_BACKWARD, when="ZeRO 1 or 2 accumulates gradients",
    reason="DeepSpeed divides the gradients of a direct loss.backward() by the accumulated steps twice:"
    " raises",
)  # fmt: skip
def refuse_direct_backward(engine: Any, prologue: Callable[[], None]) -> None:
    """Refuse `loss.backward()` where `divides_twice`."""
    if not engine._running_engine_backward:
        steps = engine.gradient_accumulation_steps()
        raise RingConfigError(
            f"loss.backward(): expected engine.backward(loss), got a direct call: DeepSpeed would divide the"
            f" gradients by gradient_accumulation_steps {steps} twice at ZeRO 1 and 2"
        )
    prologue()


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = config.get(name)
    return section if isinstance(section, Mapping) else {}


def _model_features(model: torch.nn.Module) -> Iterator[tuple[str, str]]:
    """Yield what in a model shards or routes tokens by itself, and why a ring excludes it."""
    if isinstance(model, PipelineModule):
        yield "a PipelineModule", "a ring shards the tokens that a pipeline would send on: use ZeRO"
    # Modules of these classes cannot exist without their files having been imported.
    for file, name, why in (
        (
            "deepspeed.module_inject.layers",
            "TensorParallel_Layer",
            "AutoTP (tp_model_init, init_inference) has split it over ranks that have different tokens: give"
            " ds_ring.initialize the model as it was built",
        ),
        (
            "deepspeed.inference.engine",
            "InferenceEngine",
            "init_inference replaces the layers that attend on the ring: give the model as it was built",
        ),
        (
            "deepspeed.moe.layer",
            "MoE",
            "its experts drop tokens by what one rank has, so that the sharded model is another one: use a"
            " transformers MoE model",
        ),
    ):
        kind = get_imported(file, name)
        if kind is not None and any(isinstance(part, kind) for part in model.modules()):
            yield f"a {name} of {file}", why
    if get_imported("deepspeed.runtime.tensor_parallel.init_utils", "_TP_MODEL_INIT_ARGS"):
        yield (
            "one beside deepspeed.tp_model_init",
            "AutoTP's ranks need the same tokens, and those of a ring have different ones: do not call it",
        )
    functions = get_imported("transformers.modeling_utils", "ALL_ATTENTION_FUNCTIONS", {})
    for name in dict(functions):
        if str(getattr(functions[name], "__module__", "")).startswith("deepspeed."):
            yield (
                f"one whose attn_implementation {name!r} is DeepSpeed's Ulysses",
                "UlyssesSPAttentionHF.register_with_transformers shards the sequence a second time: do not"
                " call it, set ulysses_size in the section",
            )

    tuned: Any = get_imported("peft.peft_model", "PeftModel")
    for part in model.modules() if tuned is not None else ():
        for config in part.peft_config.values() if isinstance(part, tuned) else ():
            if getattr(config, "is_prompt_learning", False):
                yield (
                    f"a {type(part).__name__} with {type(config).__name__}",
                    "its virtual tokens would stand before the tokens of each rank: use LoRA, or another"
                    " method that adapts weights",
                )


_PICKLED = "hooks of a ring cannot be pickled or copied: raises a typed error"


@patch(ENGINE, "__reduce_ex__", stage="around_save", kind="replaced", feature="pickled", reason=_PICKLED)
@patch(MODULE, "__reduce_ex__", stage="around_save", kind="replaced", feature="pickled", reason=_PICKLED)
def refuse_to_pickle(*_: object) -> NoReturn:
    """Refuse `torch.save(module)`, pickle and deepcopy of a module with the hooks of a ring."""
    raise RingConfigError(
        "model: expected its state_dict to be saved, got the module itself to be pickled or copied; save"
        " engine.module.state_dict(), or copy the model before ds_ring.initialize"
    )


# An engine without an optimizer: DeepSpeed 0.19.8 does not start at ZeRO 1 and 2, has no checkpoints at ZeRO
# 3, and fails an assertion in a backward pass.

ADD_OPTIMIZER = (
    'pass optimizer=..., or add {"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}} to the JSON'
)


def without_optimizer(config: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON for an engine that only evaluates: ZeRO 1 and 2 have nothing to shard."""
    zero = config.get("zero_optimization") or {}
    if zero.get("stage") not in (1, 2):
        return config
    log.info("no optimizer: ZeRO %s would shard its state only, and is 0 here", zero["stage"])
    return config | {"zero_optimization": {"stage": 0}}


_NO_OPTIMIZER = "DeepSpeed fails an assertion: raises a typed error"
_evaluation_patch = partial(patch, ENGINE, feature="evaluation", reason=_NO_OPTIMIZER, when="no optimizer")


@_evaluation_patch("backward", stage="around_backward")
@_evaluation_patch("step", stage="around_step")
@_evaluation_patch("scale", stage="around_call")
def refuse_training(call: Callable[..., Any], *_: Any, **__: Any) -> NoReturn:
    """Refuse a method of an engine that has no optimizer, on every rank alike."""
    raise RingConfigError(f"engine.{call.__name__}: expected an optimizer, got none; {ADD_OPTIMIZER}")


def _indexed_size(error: IndexError) -> int | None:
    """Return the size of the dimension that an index of torch does not fit; None if the text has none."""
    if match := re.search(r"out of bounds for dimension -?\d+ with size (\d+)", str(error)):
        return int(match[1])
    if match := re.search(r"for tensor of size \[([\d, ]+)\] at dimension (-?\d+)", str(error)):
        return int(match[1].split(",")[int(match[2])])
    return None


class RingUse:
    """Check the first forward pass of an engine's model in each mode (training, evaluation).

    The graph of a compiled model is not examined: the backend has read it. A module without transformers'
    interface may number tokens and compute its loss in any way: suspicious values give a warning.
    """

    def __init__(self, session: RingSession, engine: Any, is_own: bool) -> None:
        self._session, self._engine, self._is_own, self._seen = session, engine, is_own, set[bool]()

    @patch(
        ENGINE, "forward", stage="around_forward", feature="ring_use",
        reason="raises if no ring pass ran in the first forward, or plain attention over this rank's tokens"
        " did",
    )  # fmt: skip
    def around_forward(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return self._checked(forward, *args, **kwargs)
        except IndexError as error:
            batches = self._session.batches
            if batches.is_off or batches.current.mesh.sequence_size == 1:
                raise
            sharding, name = batches.current, type(self._engine.module).__name__
            if _indexed_size(error) != sharding.local_tokens:
                raise  # of another tensor: a token id above the vocabulary, a label above the classes
            raise RingShapeError(
                f"{name}: {error}; a rank has {sharding.local_tokens} of {sharding.layout.tokens} tokens, so"
                " an index of the whole sequence does not fit: use engine.ring.gather(x)[:, index]"
            ) from error

    @patch(
        ENGINE, "backward", stage="around_backward", feature="ring_use",
        reason="a batch without labels has no loss: raises a typed error",
    )  # fmt: skip
    def around_backward(self, backward: Callable[..., Any], loss: Any, *args: Any, **kwargs: Any) -> Any:
        check_loss("engine.backward", loss)
        return backward(loss, *args, **kwargs)

    def _checked(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        training = bool(self._engine.module.training)
        if self._session.batches.is_off:
            if training and torch.is_grad_enabled():
                raise RingConfigError(_TRAINS_OFF)
            return forward(*args, **kwargs)
        if training in self._seen:
            return forward(*args, **kwargs)
        sharding = self._session.batches.current
        is_alone = sharding.mesh.sequence_size == 1
        if is_alone and sharding.patterns.pattern == Causal() and not sharding.groups:
            return forward(*args, **kwargs)  # the model's own attention would be right
        before = get_forward_passes()
        with nullcontext() if is_alone or self._engine.is_compiled else self._plain_attention(sharding):
            output = forward(*args, **kwargs)
        if get_forward_passes() == before:
            if training and drops_layers(self._engine.module):
                return output  # all layers with attention may have been left out
            documents = " with documents" if sharding.groups else ""
            fault = f"the pattern {sharding.patterns.pattern}{documents} was not applied"
            if sharding.mesh.sequence_size > 1:
                tokens = f"the {sharding.local_tokens} tokens of this rank only, of {sharding.layout.tokens}"
                fault = f"attention saw {tokens}"
            raise RingConfigError(
                "expected the model to use ring attention, got no ring pass in its forward pass:"
                f" {fault}; {_WHAT_TO_DO}"
            )
        if self._is_own and not self._seen and not is_alone:
            self._warn(self._session.batches.list_tensor_names((*args, *kwargs.values())), sharding, output)
        self._seen.add(training)
        return output

    @contextmanager
    def _plain_attention(self, sharding: BatchSharding) -> Iterator[None]:
        """Refuse attention outside the ring, but for that of encoders."""
        model = self._engine.module
        apart = self._session.needs.encoder_modules(model)
        mode = _PlainAttention(sharding)
        with ExitStack() as stack:
            for part in model.modules():
                if id(part) in apart and all(id(inner) in apart for inner in part.modules()):
                    stack.enter_context(applied(mode.enter_encoder, mode.leave_encoder, part=part))
            stack.enter_context(mode)
            yield

    def _warn(self, names: set[str], sharding: BatchSharding, output: Any) -> None:
        """Warn of a module's own positions and loss, on rank 0; from copies of a batch nothing is known."""
        if not names or self._session.run_mesh.global_rank != 0:
            return
        name = type(self._engine.module).__name__
        if "position_ids" not in names:
            log.warning(_POSITIONS, name, sharding.local_tokens, sharding.layout.tokens)
        results = output.values() if isinstance(output, Mapping) else output
        results = (
            results if isinstance(results, Iterable) and not isinstance(results, torch.Tensor) else [output]
        )
        if "num_items_in_batch" not in names and any(
            isinstance(result, torch.Tensor) and result.ndim == 0 and result.requires_grad
            for result in results
        ):
            log.warning(_OWN_LOSS, name)


_encoder_patch = partial(
    patch, DEEPSPEED.given("part", "torch.nn.Module"), feature="ring_use.encoders",
    reason="attention of an encoder is its own, over as many tokens as a rank has, too",
    when="a part of the model reads images or sound",
)  # fmt: skip


class _PlainAttention(TorchFunctionMode):
    """Refuse attention outside the ring over exactly the tokens of this rank."""

    # Between other lengths (a few latents, an encoder's output) attention may be meant as it is.

    def __init__(self, sharding: BatchSharding) -> None:
        super().__init__()
        self._tokens = sharding.local_tokens
        self._all_tokens = sharding.layout.tokens
        self._depth = 0  # of modules of encoders that run now

    @_encoder_patch(stage="before_forward")
    def enter_encoder(self, *_: Any) -> None:
        self._depth += 1

    @_encoder_patch(stage="after_forward", options=("always_call",))
    def leave_encoder(self, *_: Any) -> None:
        self._depth -= 1

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._depth:
            return func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        tensors = [x for x in (*args, *(kwargs or {}).values()) if isinstance(x, torch.Tensor)]
        tokens_dim = -2 if name in _PLAIN else 0 if name == _MULTIHEAD else None
        local = tokens_dim is not None and all(
            x.ndim >= 2 and x.shape[tokens_dim] == self._tokens
            for x in tensors[:2]  # queries and keys
        )
        # Scores of attention written out: [(batch, heads,) ..., tokens, tokens].
        scores = name in _SOFTMAX and tensors and tensors[0].ndim >= 3
        if local or (scores and tensors[0].shape[-2:] == (self._tokens, self._tokens)):
            raise RingConfigError(
                f"expected ring attention, got {name} over the {self._tokens} tokens of this rank, of"
                f" {self._all_tokens}: that part of the model would see no other rank's; {_WHAT_TO_DO}"
            )
        return func(*args, **(kwargs or {}))
