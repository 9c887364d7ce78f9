"""Compare a transformers model on a ring with itself on one process: exact, refused, or wrong.

Owns the check that `ds-ring check-model` and the tests' table run on every rank: a small model of the family
with random weights (small_model.py), a batch, both runs, and the verdict. What is compared, and how, is
comparison.py's. The ring is entered as users enter it, through `ds_ring.initialize`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import deepspeed
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn

from ds_ring.errors import RingConfigError, RingError
from ds_ring.integrations.deepspeed.batch import IGNORE, Batch
from ds_ring.integrations.deepspeed.comparison import (
    Difference,
    Numbers,
    Tolerance,
    beyond,
    compare,
    largest,
    recording,
)
from ds_ring.integrations.deepspeed.initialize import initialize

from .small_config import read_config, shrink
from .small_model import (
    HAVE_A_LOSS,
    SAMPLES,
    build,
    make_batch,
    section_for,
    usual_head,
)

Result = Literal["exact", "refused", "WRONG", "invalid"]


@dataclass(frozen=True)
class CheckRequest:
    """Describe what is to be checked."""

    source: str  # a config.json, its folder, or a model type of transformers
    tokens: int = 61  # in each of the two samples
    layers: int = 2  # at least so many; each kind of layer is there once at least
    head: str | None = None  # a key of HEADS; None for what the family is mostly used with
    # the "ring_attention" section; None for one that says what the model's attention is
    section: Mapping[str, Any] | None = None
    # values of the model's configuration, set before it is made small
    changes: Mapping[str, Any] = field(default_factory=dict)
    stage: int = 0  # of ZeRO
    seed: int = 0  # of weights and batch


@dataclass(frozen=True)
class ModelReport:
    """Hold the result of a check."""

    source: str
    model: str  # its class, and the request's source
    # "exact"; "refused" with a typed error before anything wrong was computed; "WRONG"; "invalid" where the
    # model itself cannot be made or run on one process
    result: Result
    reason: str = ""  # of a refusal or a crash, with the error's type
    differences: tuple[Difference, ...] = ()  # all that rounding does not explain, in the order of computing
    largest: Mapping[str, Difference] = field(default_factory=dict)  # the largest relative error of each kind
    ring_size: int = 0
    tokens: int = 0
    layers: int = 0
    section: Mapping[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Return the report as an object of JSON values."""
        values = asdict(self)
        values["differences"] = [one._asdict() for one in self.differences]
        values["largest"] = {kind: one._asdict() for kind, one in self.largest.items()}
        return values


def check_model(request: CheckRequest) -> ModelReport:
    """Run the model on one process and on the ring of all ranks, and compare. Collective."""
    # Every rank computes the whole run, too, and compares for itself: what differs on one rank only is found.
    # Returns the report of all ranks together, the same on each. Raises nothing: a crash is in the report.
    mine = _check_here(request)
    reports: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(reports, mine)
    return _merged(reports)


def _check_here(request: CheckRequest) -> ModelReport:
    """Return this rank's report."""
    _quiet()
    world = dist.get_world_size()
    try:
        config = shrink(read_config(request.source), request.tokens, request.layers, request.changes)
        head = request.head or usual_head(config)
        model = build(config, head, request.seed)
    except RingConfigError as error:
        return ModelReport(request.source, "", "invalid", str(error), ring_size=world)
    section = dict(request.section) if request.section is not None else section_for(model, head)
    told: dict[str, Any] = {
        "source": request.source,
        "model": type(model).__name__,
        "ring_size": world,
        "tokens": request.tokens,
        "layers": getattr(config, "num_hidden_layers", 0),
        "section": section,
    }
    whole = make_batch(config, head, request.tokens, request.seed)
    ring, fault = None, None
    try:
        ring = _on_the_ring(model, whole, head, section, request.stage)
    except Exception as error:
        fault = f"{type(error).__name__}: {error}"
        if isinstance(error, RingError) and isinstance(error, ValueError):  # a mistake of the caller
            return ModelReport(**told, result="refused", reason=fault)
    try:
        alone = _alone(build(config, head, request.seed), whole, head)
    except Exception as error:
        return ModelReport(**told, result="invalid", reason=f"alone: {type(error).__name__}: {error}")
    if ring is None:
        return ModelReport(**told, result="WRONG", reason=f"crash: {fault}")
    found = compare(ring, alone)
    wrong = beyond(found, Tolerance.of(torch.float32))
    return ModelReport(
        **told,
        result="WRONG" if wrong else "exact",
        reason=_first_of(wrong),
        differences=tuple(wrong),
        largest=largest(found),
    )


def _merged(reports: list[ModelReport]) -> ModelReport:
    """Return the report of all ranks: the worst, and WRONG if they do not agree on the result."""
    results = {report.result for report in reports}
    if len(results) > 1:
        text = "; ".join(f"rank {rank}: {one.result} {one.reason}" for rank, one in enumerate(reports))
        worst = max(reports, key=lambda one: len(one.differences))
        return ModelReport(**(vars(worst) | {"result": "WRONG", "reason": f"ranks differ: {text}"}))
    return max(reports, key=lambda one: max((x.error for x in one.largest.values()), default=0.0))


def _alone(model: nn.Module, whole: Batch, head: str) -> Numbers:
    """Run the model with its own attention, written out ("eager"), on this process."""
    model.set_attn_implementation("eager")  # type: ignore[operator]
    with recording(model) as layers:
        if head in HAVE_A_LOSS:
            output = model(**whole)
            loss = output.loss
        else:
            output = model(input_ids=whole["input_ids"])
            loss = torch.nn.functional.cross_entropy(
                _logits(output).flatten(0, 1), whole["shift_labels"].flatten(), ignore_index=IGNORE
            )
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return Numbers(_logits(output).detach(), float(loss.detach()), layers, gradients)


def _on_the_ring(
    model: nn.Module, whole: Batch, head: str, section: Mapping[str, Any], stage: int
) -> Numbers:
    engine, _, _, _ = initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        config={
            "train_micro_batch_size_per_gpu": SAMPLES,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 10**9,
            "sequence_parallel_size": dist.get_world_size(),
            "ring_attention": {"hop_timeout_seconds": 20} | dict(section),
        },
    )
    if section.get("attention") == "as_is":  # the rest of the graph as it is: no compiler's time, no rounding
        engine.compile(backend="ds_ring", compile_kwargs={"options": {"inner": "eager"}})
    try:
        return _trained_once(engine, whole, head)
    finally:
        engine.ring.mesh.close()


def _trained_once(engine: Any, whole: Batch, head: str) -> Numbers:
    session = engine.ring
    # a graph has no layers to record
    recorded: AbstractContextManager[dict[str, Tensor]] = (
        nullcontext({}) if engine.is_compiled else recording(engine.module)
    )
    with recorded as layers:
        if head == "sequence-classification":
            local = session.shard_batch({"input_ids": whole["input_ids"]})
            output = engine(**local, labels=whole["labels"])
            loss, mean = output.loss, output.loss
        elif head in HAVE_A_LOSS:
            output = engine(**session.shard_batch(whole))
            loss = output.loss
            mean = session.mean_loss(loss)
        else:
            local = session.shard_batch(whole)
            labels = ("labels", "shift_labels", "num_items_in_batch")
            output = engine(**{key: value for key, value in local.items() if key not in labels})
            loss, mean, _ = session.loss(_logits(output), local)
    engine.backward(loss)
    gradients = {}
    for name, parameter in engine.module.named_parameters():
        gradient = deepspeed.utils.safe_get_full_grad(parameter)
        if gradient is not None:
            gradients[name] = gradient.detach().float().clone()
    logits = _logits(output).detach()
    whole_logits = session.gather(logits) if head != "sequence-classification" else logits
    return Numbers(
        whole_logits, float(mean.detach()), {name: session.gather(x) for name, x in layers.items()}, gradients
    )


def _logits(output: Any) -> Tensor:
    logits: Tensor = output.logits if hasattr(output, "logits") else output.last_hidden_state
    return logits


def _first_of(wrong: list[Difference]) -> str:
    """Name the layer that differs first, and the parameter whose gradient differs most."""
    if not wrong:
        return ""
    gradients = [one for one in wrong if one.kind == "gradient"]
    said = [str(wrong[0])] + ([str(max(gradients, key=lambda one: one.error))] if gradients else [])
    return f"{len(wrong)} differ: first {said[0]}" + (f", most {said[1]}" if len(said) > 1 else "")


def _quiet() -> None:
    deepspeed.utils.logger.setLevel(logging.ERROR)
    transformers.logging.set_verbosity_error()
