"""Compare the first training step on the ring with the same model on one process.

Owns the record of the step, the run of the model's copy on rank 0, their comparison and the error that all
ranks raise. Reads the engine and changes nothing in it: parameters, gradients, buffers, optimizer and random
numbers are what they would be without it.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ds_ring.comm.groups import gather_objects
from ds_ring.comm.mesh import RingMesh
from ds_ring.data.batch import IGNORE
from ds_ring.data.batch_sharding import BatchSharding
from ds_ring.data.engine import DEEPSPEED, ENGINE, is_transformers_model
from ds_ring.data.layer_patterns import LayerPatterns
from ds_ring.data.packing import RowGroup
from ds_ring.data.session import RingSession
from ds_ring.errors import RingConfigError, RingVerifyError
from ds_ring.ops.shard import gather_sequence
from ds_ring.patches import AppliedPatch, applied, apply, patch
from ds_ring.schedule.layout import make_layout

log = logging.getLogger(__name__)
ComparedKind = Literal["layer", "logits", "loss", "gradient"]
_NAMED = 8  # differences in the message
_AGAIN = "again"  # a verdict: the loss scale of fp16 was too large, the next step is looked at
_LAYER = DEEPSPEED.given("layer", "torch.nn.Module")
_patch = partial(patch, when="verify_first_batch")
_records_layer = _patch(
    _LAYER, stage="after_forward", feature="first_batch.layers", reason="outputs by layer"
)
_notes_gradient = _patch(
    DEEPSPEED.given("tensor", "torch.Tensor"), stage="in_backward", feature="first_batch.gradients",
    reason="what the training loop made of the loss and the logits",
)  # fmt: skip
_step_patch = partial(
    _patch, ENGINE, feature="first_batch", reason="records the first step and compares it with one process"
)
_HELD = (
    "mesh: expected engine.ring.mesh as it is in this forward pass, got the mesh of all ranks, of which only"
    " rank 0 computes now; a RingAttention, or a mesh that was read before, keeps that mesh"
)
_ADVICE = (
    "in one process engine.ring.layout and engine.ring.mesh are those of one rank: read both in each forward"
    " pass, or call engine.ring.attention()"
)
_OTHER_LOSS = (
    "verify_first_batch: the loss of your loop is not that of engine.ring.loss(logits, batch): %s. It was not"
    " compared with one process; unless you mean another loss, call engine.ring.loss"
)
_NO_SOFTMAX = 5e-2  # a sum over the vocabulary, of the gradient's norm: more than rounding in bfloat16
_FLOOR = 1e-2  # of the root mean square of all gradients' norms


# Compare what two models computed for the same batch. Shapes: B samples, T tokens.


# [Note: measuring a difference]
# Outputs are compared token by token: the norm of the largest difference over the mean norm of a token, so
# that one wrong token among many stays visible. A gradient is compared by norms, by itself: sums over
# parameters would hide a wrong one. Some gradients are zero but for rounding (a key's bias): a norm counts as
# at least a hundredth of the typical one of the model.
@dataclass(frozen=True)
class Tolerance:
    """Hold the relative errors that rounding explains; anything larger is a difference."""

    outputs: float
    loss: float
    gradients: float

    @classmethod
    def for_dtype(cls, dtype: torch.dtype) -> Tolerance:
        """Return the tolerance of a model of `dtype`, against a run in float32 (float64 for float64)."""
        return {
            torch.float64: cls(1e-6, 1e-7, 1e-6),
            torch.float32: cls(1e-4, 1e-5, 2e-4),
            torch.float16: cls(2e-2, 5e-3, 5e-2),
            torch.bfloat16: cls(1e-1, 2e-2, 2e-1),
        }[dtype]


class Difference(NamedTuple):
    """Hold one comparison: `name` is a layer's or a parameter's, `error` is relative."""

    kind: ComparedKind
    name: str
    error: float

    def __str__(self) -> str:
        return f"{self.kind} {self.name}".rstrip() + f" by {self.error:.1e}"


@dataclass
class Numbers:
    """The results of a run of a model, over the whole sequence."""

    logits: Tensor  # [B, T, ...], or [B, ...] where there is one result for a sample
    loss: float | None = None  # the mean over labelled tokens; None if it was not computed
    # outputs [B, T, ...] of the model's layers by their names, in the order of computing
    layers: dict[str, Tensor] = field(default_factory=dict)
    # by the names of parameters; those without one are left out
    gradients: dict[str, Tensor] = field(default_factory=dict)


def difference(kind: ComparedKind, name: str, error: float) -> Difference:
    """Return a comparison; NaN, which compares with nothing and must not pass for small, becomes infinity."""
    return Difference(kind, name, error if error == error else float("inf"))


def compare(got: Numbers, expected: Numbers) -> list[Difference]:
    """Return the error of everything that was compared: layers, logits, loss, gradients."""
    return compare_outputs(got, expected) + compare_gradients(got.gradients, expected.gradients)


def compare_outputs(got: Numbers, expected: Numbers) -> list[Difference]:
    """Return the errors of the layers that both recorded, of the logits, and of the loss if there is one."""
    differences = [
        difference("layer", name, _by_token(got.layers[name], output))
        for name, output in expected.layers.items()
        if name in got.layers
    ]
    differences.append(difference("logits", "", _by_token(got.logits, expected.logits)))
    if got.loss is not None and expected.loss is not None:
        error = abs(got.loss - expected.loss) / max(abs(expected.loss), 1e-6)
        differences.append(difference("loss", "", error))
    return differences


def beyond(differences: list[Difference], tolerance: Tolerance) -> list[Difference]:
    """Return those that rounding does not explain, in the order in which they were computed."""
    allowed = {"gradient": tolerance.gradients, "loss": tolerance.loss}
    return [
        difference
        for difference in differences
        if not difference.error <= allowed.get(difference.kind, tolerance.outputs)
    ]


def largest(differences: list[Difference]) -> dict[str, Difference]:
    """Return the largest error of each kind."""
    return {
        difference.kind: difference
        for difference in sorted(differences, key=lambda difference: difference.error)
    }


@contextmanager
def recording(model: nn.Module, encoder_modules: Container[int] = ()) -> Iterator[dict[str, Tensor]]:
    """Record the outputs [B, T, ...] of the model's layers: modules in a ModuleList that have parameters.

    Those of image encoders (`ModelNeeds.encoder_modules`), which each rank runs on images of its own, are
    left out.
    """
    outputs: dict[str, Tensor] = {}

    @_records_layer
    def record(name: str, _: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        first = output[0] if isinstance(output, (tuple, list)) and output else output
        if isinstance(first, Tensor) and first.ndim == 3 and first.is_floating_point():
            outputs[name] = first.detach().clone()

    with ExitStack() as stack:
        for path, parent in model.named_modules():
            for name, layer in parent.named_children() if isinstance(parent, nn.ModuleList) else ():
                # Rotary embeddings (Granite SWA) have no parameters; one row of theirs can serve all samples.
                if id(layer) in encoder_modules or next(layer.parameters(), None) is None:
                    continue
                stack.enter_context(applied(partial(record, f"{path}.{name}"), layer=layer))
        yield outputs


def _by_token(got: Tensor, expected: Tensor) -> float:
    if got.shape != expected.shape:
        return float("inf")
    got, expected = got.detach().double(), expected.detach().double()
    typical = expected.norm(dim=-1).mean().clamp_min(1e-12)
    return float((got - expected).norm(dim=-1).max() / typical)


def compare_gradients(got: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[Difference]:
    """Return the error of each parameter's gradient; one that only one of both has is zero on the other."""
    norms = torch.tensor([float(gradient.norm()) for gradient in expected.values()] or [0.0], device="cpu")
    floor = _FLOOR * float(norms.square().mean().sqrt()) + 1e-30
    differences = []
    for name in [*expected, *[name for name in got if name not in expected]]:
        zero = torch.zeros((), dtype=torch.float64, device="cpu")
        mine, theirs = got.get(name, zero).double(), expected.get(name, zero).double()
        error = float((mine - theirs).norm()) / max(float(theirs.norm()), floor)
        differences.append(difference("gradient", name, error))
    return differences


# Record a training step: its forward passes, and weights and gradients as a whole on rank 0.


@dataclass
class Forward:
    """Record a forward pass of the step: inputs and outputs, of this rank's tokens or of all."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    attended: tuple[int, LayerPatterns, tuple[RowGroup, ...]]  # tokens, and who attends to whom
    logits: Tensor
    loss: Tensor | None
    layers: dict[str, Tensor]
    # gradients of "loss" (what the training loop made of it) and "logits", without those that are not used
    gradients: dict[str, Tensor] = field(default_factory=dict)
    sharding: BatchSharding | None = None
    labels: Tensor | None = None  # the shift_labels of the batch, where they are known


def whole_parameters(module: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the whole weights, and the gradients as the engine reduced them, on rank 0. Collective."""
    weights, gradients = {}, {}
    for name, parameter in module.named_parameters():
        gradient = deepspeed.utils.safe_get_full_grad(parameter) if parameter.requires_grad else None
        with deepspeed.zero.GatheredParameters([parameter]):
            if dist.get_rank() == 0:
                weights[name] = parameter.detach().cpu().clone()
        if gradient is not None and dist.get_rank() == 0:
            gradients[name] = gradient.detach().float().cpu().clone()
    return weights, gradients


def read_outputs(output: Any) -> tuple[Tensor, Tensor | None]:
    """Return logits (or hidden states) and loss of a model's output."""
    if isinstance(output, Tensor):
        return (output, None) if output.ndim else (output[None], output)
    loss = getattr(output, "loss", None)
    for name in ("logits", "last_hidden_state"):
        logits = getattr(output, name, None)
        if name == "logits" and logits is not None and not isinstance(logits, Tensor) and loss is not None:
            with torch.no_grad():  # of a short batch: the loss and the gradients are those of the tiles
                return logits.tensor(), loss
        if isinstance(logits, Tensor):
            return logits, loss
    items = tuple(output.values()) if isinstance(output, Mapping) else output
    items = items if isinstance(items, (tuple, list)) else ()
    tensors = [item for item in items if isinstance(item, Tensor)]
    if not tensors:
        raise RingVerifyError(f"verify_first_batch: expected logits or a tensor, got {type(output).__name__}")
    return max(tensors, key=lambda item: item.ndim), next((item for item in tensors if item.ndim == 0), None)


# Compare a loss that the loop computes. The copy of one process gets the gradient of the logits from the
# loop, since it cannot run the loop, so it repeats a wrong loss. That gradient is compared with the one of
# `engine.ring.loss`, rank by rank: labels that are shifted twice give another direction, a mean over the
# labels of a rank another factor on each rank. A loop may mean another loss: a difference is a warning.


class LossFit(NamedTuple):
    """Hold how a rank's gradient of the logits fits that of the summed cross entropy of its labels.

    Attributes:
        labelled: its labelled tokens.
        factor: with which the gradient of the cross entropy is nearest; None where that is zero.
        squared: the squared norm of the gradient, and of what that factor leaves of it.
    """

    labelled: int
    factor: float | None
    squared: tuple[float, float]


def read_loss_fit(forward: Forward) -> LossFit | None:
    """Return the fit of a forward pass; None for a loss of the module, and for another one than of a softmax.

    A gradient of softmax sums to zero over the vocabulary; one of hidden states or of squares does not.
    """
    got_BSV, labels_BS, logits_BSV = forward.gradients.get("logits"), forward.labels, forward.logits.detach()
    if got_BSV is None or labels_BS is None or "loss" in forward.gradients:
        return None
    if logits_BSV.shape[:-1] != labels_BS.shape or int(labels_BS.max()) >= logits_BSV.shape[-1]:
        return None
    labelled_BS = labels_BS != IGNORE
    expected_BSV = logits_BSV.to(torch.promote_types(logits_BSV.dtype, torch.float32)).softmax(dim=-1)
    ones_BS1 = torch.ones_like(expected_BSV[..., :1])
    expected_BSV.scatter_add_(-1, labels_BS.clamp_min(0)[..., None], -ones_BS1).mul_(labelled_BS[..., None])
    got_BSV = got_BSV.to(expected_BSV.dtype)
    if float(got_BSV.sum(dim=-1).norm()) > _NO_SOFTMAX * float(got_BSV.norm()):
        return None
    norm = float(expected_BSV.square().sum())
    factor = float((got_BSV * expected_BSV).sum()) / norm if norm > 0 else None
    rest = got_BSV - expected_BSV * (factor or 0.0)
    return LossFit(
        int(labelled_BS.sum()), factor, (float(got_BSV.square().sum()), float(rest.square().sum()))
    )


def compare_loss(fits: Sequence[LossFit], divisor: float, scale: float | None, dtype: torch.dtype) -> str:
    """Return how all ranks' gradients differ from those of the mean over all labels; "" if they do not.

    Args:
        divisor: by which the engine divides summed gradients ([Note: gradient scale] in loss.py).
        scale: of the loss in the engine; None if unknown.
        dtype: of the logits.
    """
    half = dtype in (torch.float16, torch.bfloat16)
    rounding, tolerance = (2e-2, 1e-1) if half else (2e-4, 1e-3)
    squared, rest = (sum(values) for values in zip(*(fit.squared for fit in fits), strict=True))
    if not rest <= tolerance**2 * squared:
        return f"its gradient differs by {(rest / squared) ** 0.5:.1e}"
    factors = [fit.factor for fit in fits if fit.factor is not None]
    if not factors:
        return ""
    least, most = min(factors), max(factors)
    if not most - least <= rounding * abs(most):
        return f"ranks weight a token by {least:.3g} to {most:.3g}, each by labels of its own"
    times = most * sum(fit.labelled for fit in fits) / divisor / (scale or 1.0)
    if scale is not None and not abs(times - 1) <= rounding:
        return f"its gradient is {times:.3g} times as large"
    return ""


# Copy a model for one rank ([Note: one process]).


def refuse_dropout(model: nn.Module) -> None:
    """Raise a RingConfigError for a model with dropout, which no two runs share."""
    for name, module in model.named_modules():
        values = {key: value for key, value in vars(module).items() if key.endswith(("dropout", "layerdrop"))}
        if isinstance(module, nn.Dropout):
            values = {"p": module.p}
        active = next((key for key, value in values.items() if isinstance(value, float) and value > 0), None)
        if active is not None:
            raise RingConfigError.wrong(
                "verify_first_batch", "no dropout", f"{name}.{active} = {values[active]}", "set it to 0"
            )


def skeleton(model: nn.Module) -> nn.Module:
    """Return a copy whose parameters have no memory yet: whole shapes, also where ZeRO 3 has cut them."""
    memo: dict[int, Any] = {
        id(p): nn.Parameter(
            torch.empty(getattr(p, "ds_shape", p.shape), dtype=torch.float32, device="meta"), p.requires_grad
        )
        for p in model.parameters()
    }
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        raise RingConfigError(
            f"verify_first_batch: expected a model that can be copied, got {type(error).__name__}: {error};"
            " a module that has a RingAttention calls engine.ring.attention() in its forward pass"
        ) from error


def filled(
    alone: nn.Module, module: nn.Module, weights: dict[str, Tensor], changes: Sequence[AppliedPatch],
    device: torch.device,
) -> nn.Module:  # fmt: skip
    """Return the copy with the weights and buffers of the engine's model, in float32 or float64.

    What ds_ring changed in the modules of the engine's model stays there: the copy runs its own code.
    """
    alone.to_empty(device=device)
    first: dict[int, nn.Parameter] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        place, _, key = name.rpartition(".")
        # `to_empty` unties: give each name the parameter of the first one.
        tied = first.setdefault(id(parameter), alone.get_parameter(name))
        alone.get_submodule(place).register_parameter(key, tied)
    state = dict(alone.named_parameters()) | dict(alone.named_buffers(remove_duplicate=False))
    for name, value in [*weights.items(), *module.named_buffers(remove_duplicate=False)]:
        wide = torch.float32 if value.dtype in (torch.float16, torch.bfloat16) else value.dtype
        state[name].data = value.detach().to(device, wide, copy=True)
    changed = {(id(change.owner), change.row.name) for change in changes}
    for name, part in list(alone.named_modules()):
        engine_part = module.get_submodule(name)
        for key, child in engine_part.named_children():
            if not hasattr(part, key) or getattr(part, key) is None:  # a RingAttention, say
                setattr(part, key, child)
        later = {  # the session, say: what was set after the copy was made
            key: value
            for key, value in vars(engine_part).items()
            if key[0] != "_" and vars(part).get(key) is None and (id(engine_part), key) not in changed
        }
        if later.get("gradient_checkpointing"):  # transformers': the flag without the function
            later["_gradient_checkpointing_func"] = partial(checkpoint, use_reentrant=False)
        vars(part).update(later)
    return alone.train()


@_patch(
    _LAYER, stage="before_forward", feature="first_batch.masks",
    reason="models inside a module get no padding mask, on the copy of one process",
)  # fmt: skip
def _drop_mask(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args, kwargs | {"attention_mask": None} if "attention_mask" in kwargs else kwargs


@contextmanager
def without_masks(alone: nn.Module) -> Iterator[None]:
    """Run inner models without padding masks, as a ring does: the module around them has one."""
    with ExitStack() as stack:
        for part in alone.modules():
            if part is not alone and is_transformers_model(part):
                stack.enter_context(applied(_drop_mask, layer=part))
        yield


def on_device(value: Any, device: torch.device) -> Any:
    """Return arguments with their tensors on `device`."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {name: on_device(item, device) for name, item in value.items()}
    if isinstance(value, tuple) and type(value) is tuple:
        return tuple(on_device(item, device) for item in value)
    return value


# [Note: one process]
# Rank 0 needs memory for the whole model in float32, its gradients, and the whole batch: the check is for a
# short first batch. The copy has the model's own attention, made before the ring's was given to it; where the
# JSON asks for another one than the model's (LongNet, another window), it has the ring's kernel on all tokens
# at once, which shows hops and positions to be right but not the pattern. Attention of your own asks
# `engine.ring.attention()`, or `engine.ring.layout` and `engine.ring.mesh` in each forward pass: those of one
# rank here. A mesh that a module holds is refused. The step compared is the one before the first
# `engine.step()` at a boundary of gradient accumulation; gradients are compared as the engine reduced them.
@dataclass
class FirstBatch:
    """Compare the first step of an engine with one process."""

    model: nn.Module
    session: RingSession
    trains: bool = True
    engine: Any = None  # DeepSpeed's, as soon as there is one
    _alone: nn.Module = field(init=False)
    _forwards: list[Forward] = field(default_factory=list)
    _done: bool = False

    def __post_init__(self) -> None:
        if not self.trains:
            raise RingConfigError("verify_first_batch: expected an optimizer, got none; set it to false")
        refuse_dropout(self.model)
        self._alone = skeleton(self.model)

    @_step_patch("forward", stage="around_forward")
    def around_forward(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._done or not (self.engine.module.training and torch.is_grad_enabled()):
            return forward(*args, **kwargs)
        if not self._forwards:
            needs, session = self.session.needs, self.session
            needs.copies.refuse_pattern(self.engine.module, session.config, session.changes)
        sharding = self.session.batches.current
        with recording(self.engine.module, self.session.needs.encoder_modules(self.engine.module)) as layers:
            output = forward(*args, **kwargs)
        attended = sharding.layout.tokens, sharding.patterns, sharding.groups
        logits, loss = read_outputs(output)
        labels = self.session.batches.get_labels([*args, *kwargs.values()])
        seen = Forward(args, kwargs, attended, logits, loss, layers, sharding=sharding, labels=labels)
        # What the training loop makes of the results shows in the backward pass.
        for name, result in (("loss", loss), ("logits", None if logits is loss else logits)):
            if result is not None and result.requires_grad:
                note = _notes_gradient.to(partial(seen.gradients.__setitem__, name))
                apply(note, session=self.session, tensor=result)
        self._forwards.append(seen)
        return output

    @_step_patch("step", stage="around_step")
    def around_step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self._done and self.engine.is_gradient_accumulation_boundary():
            with self._patience():
                self._verify(self.engine)
        return step(*args, **kwargs)

    def _patience(self) -> AbstractContextManager[None]:
        """Let the others wait as long as at the start: rank 0 computes a step of the whole model."""
        detector, limit = self.session.run_mesh.detector, self.session.run_mesh.timeouts.limit("start")
        return nullcontext() if detector is None else detector.within("verify_first_batch", limit)

    @torch.no_grad()
    def _verify(self, engine: Any) -> None:
        """Gather the step on rank 0, compare there, and tell all ranks. Collective."""
        used = [forward for forward in self._forwards if forward.gradients]
        self._forwards = []
        if not used:
            return
        means = [
            None if forward.loss is None else float(self.session.mean_loss(forward.loss)) for forward in used
        ]
        losses = [self._describe_loss(forward) for forward in used]
        pieces = [self._pieces(forward) for forward in used]
        weights, gradients = whole_parameters(engine.module)
        verdict: list[Any] = [None]
        if dist.get_rank() == 0:
            try:
                verdict = [self._compare_with_one_process(engine.module, weights, pieces, means, gradients)]
            except Exception as error:
                # Any error becomes the verdict: the other ranks wait for it in a broadcast.
                verdict = [f"the model on one process raised {type(error).__name__}: {error}; {_ADVICE}"]
        dist.broadcast_object_list(verdict, src=0, device=self.session.device)
        if verdict[0] == _AGAIN:
            log.info("verify_first_batch: gradients overflowed in fp16, the next step is compared")
            return
        self._done = True
        del self._alone
        if verdict[0] is not None:
            raise RingVerifyError(
                f"verify_first_batch: expected the ring to equal one process, got: {verdict[0]}"
            )
        if any(losses) and dist.get_rank() == 0:
            log.warning(_OTHER_LOSS, next(filter(None, losses)))

    def _describe_loss(self, forward: Forward) -> str:
        """Return how the loss that the loop computes of the logits differs from `engine.ring.loss`; "" if it
        does not, or if the module has the loss, which is compared. Collective.
        """
        fits = read_loss_fit(forward)
        fits_by_rank = gather_objects(fits)
        if fits is None or any(fit is None for fit in fits_by_rank):
            return ""
        fp16 = bool(self.engine.fp16_enabled())  # whose loss scale is in the gradients
        scale = None if fp16 else 1 / self.engine.gradient_accumulation_steps()
        return compare_loss(fits_by_rank, self.session.gradient_divisor, scale, forward.logits.dtype)

    def _compare_with_one_process(
        self,
        module: nn.Module,
        weights: dict[str, Tensor],
        pieces: list[list[Forward]],
        means: list[float | None],
        gradients: dict[str, Tensor],
    ) -> str | None:
        """Return None if the ring's numbers are right, or what differs. On rank 0."""
        dtype = next((x.dtype for x in weights.values() if x.is_floating_point()), torch.float32)
        if dtype is torch.float16 and not all(bool(x.isfinite().all()) for x in gradients.values()):
            # An overflow skips the step: fp16 training lowers its loss scale and continues. This check is
            # then repeated.
            return _AGAIN
        alone = filled(self._alone, module, weights, self.session.changes, self.session.device)
        self.session.needs.copies.set_attention(alone, module, self.session.config)
        differences: list[Difference] = []
        for parts, mean in zip(pieces, means, strict=True):
            differences += self._forward_alone(alone, parts, mean)
        expected = {name: p.grad.cpu() for name, p in alone.named_parameters() if p.grad is not None}
        differences += compare_gradients(gradients, expected)
        wrong = beyond(differences, Tolerance.for_dtype(dtype))
        if wrong:
            rest = f" and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
            names = "; ".join(str(error) for error in wrong[:_NAMED]) + rest
            return (
                f"{names}; look at the first name: a model of your own uses position_ids, shift_labels and"
                " engine.ring.loss"
            )
        worst = ", ".join(str(error) for error in largest(differences).values())
        log.info("verify_first_batch: the ring equals one process; largest relative errors: %s", worst)
        return None

    def _forward_alone(self, alone: nn.Module, parts: list[Forward], mean: float | None) -> list[Difference]:
        """Repeat one forward pass of the step, replica by replica; its gradients add up in `alone`."""
        differences, total = [], 0.0
        divisor = self.session.gradient_divisor
        for part in parts:
            devices = [self.session.device] if self.session.device.type == "cuda" else []
            with (
                torch.enable_grad(),
                torch.random.fork_rng(devices),
                recording(alone, self.session.needs.encoder_modules(alone)) as layers,
                without_masks(alone),
                self.session.needs.one_process(),
                self._one_rank(part, alone) as single,
            ):
                kwargs = dict(part.kwargs)
                if isinstance(kwargs.get("num_items_in_batch"), Tensor):  # the loss is a mean over the world
                    kwargs["num_items_in_batch"] = kwargs["num_items_in_batch"] * divisor
                kwargs = self.session.needs.copies.arguments(alone, kwargs, single)
                args, kwargs = on_device((part.args, kwargs), self.session.device)
                output = alone(*args, **kwargs)
                logits, loss = read_outputs(output)
                if "loss" in part.gradients and loss is not None:
                    (loss * part.gradients["loss"].to(loss)).backward()
                    total += float(loss.detach())
                else:
                    logits.backward(part.gradients["logits"].to(logits) / divisor)
            # Of a module that returns its loss alone there are no logits: each rank's is its part.
            compared = part.logits if logits.shape == (1,) and loss is not None else logits.detach().cpu()
            rows = Numbers(compared, layers={name: x.cpu() for name, x in layers.items()})
            differences += compare_outputs(Numbers(part.logits, layers=part.layers), rows)
        if mean is not None and "loss" in parts[0].gradients:
            differences.append(difference("loss", "", abs(mean - total) / max(abs(total), 1e-6)))
        return differences

    @contextmanager
    def _one_rank(self, part: Forward, alone: nn.Module) -> Iterator[BatchSharding]:
        """Make the session's attention, layout and mesh those of all tokens on this rank inside the block.

        A call on the mesh of the run, or on one that a module holds, is refused: no other rank takes part.
        """
        tokens, patterns, groups = part.attended
        layout, book = make_layout("contiguous", tokens=tokens, ring_size=1), self.session.batches
        single = BatchSharding(self.session.config, layout, RingMesh.single(), patterns, groups)
        held = [mesh for module in alone.modules() for mesh in vars(module).values()]
        meshes = [self.session.run_mesh, *(mesh for mesh in held if isinstance(mesh, RingMesh))]
        states = {mesh.state for mesh in meshes if mesh.sequence_size > 1}
        before, book._current = book._current, single
        for state in states:
            state.refusal = _HELD
        try:
            yield single
        finally:
            book._current = before
            for state in states:
                state.refusal = ""

    def _pieces(self, step: Forward) -> list[Forward]:
        """Return the whole sequences of a forward pass, on the CPU, on rank 0, each once. Collective."""
        sharding = step.sharding
        assert sharding is not None
        mesh = sharding.mesh
        whole = mesh is not self.session.run_mesh and mesh.sequence_size == 1  # this rank's samples are whole

        def take(value: Any) -> Any:
            if isinstance(value, dict):
                return {name: take(item) for name, item in value.items()}
            if not isinstance(value, Tensor):
                return value
            value = value.detach()
            if value.ndim >= 2 and value.shape[1] == sharding.local_tokens and not whole:
                value = gather_sequence(value, sharding.layout, mesh=mesh, dim=1)
            return value.cpu().contiguous()

        # Of results of the whole sequence each rank has the gradient; they are averaged, not summed.
        if not whole and (step.logits.ndim < 2 or step.logits.shape[1] != sharding.local_tokens):
            step.gradients |= {
                name: x * mesh.sequence_size for name, x in step.gradients.items() if name == "logits"
            }
        args, results = tuple(take(value) for value in step.args), (take(step.logits), take(step.loss))
        rest = take(step.layers), take(step.gradients)
        taken = Forward(args, take(step.kwargs), step.attended, *results, *rest)
        pieces: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(taken if whole or mesh.sequence_rank == 0 else None, pieces, dst=0)
        return [piece for piece in pieces or () if piece is not None]
