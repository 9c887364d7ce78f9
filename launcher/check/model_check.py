"""Compare a transformers model on a ring with itself on one process: exact, refused, or wrong.

Owns the check that `ds-ring check-model` and the tests' table run on every rank: a small model of the family
with random weights (small_model.py), a batch, both runs, and the verdict. What is compared, and how, is
first_batch.py's; which differences are rounding, is rounding.py's. The ring is entered as users enter it,
through `ds_ring.initialize`.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Literal

import deepspeed
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from transformers import PreTrainedModel

from ds_ring.comm.groups import gather_objects
from ds_ring.data.batch import IGNORE, Batch
from ds_ring.engines.first_batch.first_batch import (
    Difference,
    Numbers,
    Tolerance,
    beyond,
    compare,
    largest,
    recording,
)
from ds_ring.errors import RingConfigError, RingError
from ds_ring.layers.selection.total_order import TotalOrder
from ds_ring.models.variants import encoder_modules
from ds_ring.start import initialize

from .rounding import InFloat64, in_float64, measure_moved_rounding, measure_rounding
from .small_images import LEAST_TOKENS, add_images
from .small_model import (
    HEADS,
    SAMPLES,
    Checkpointing,
    Form,
    Given,
    build,
    has_a_loss,
    make_batch,
    make_form,
    read_config,
    section_for,
    shrink,
    usual_head,
)
from .small_sounds import add_sounds, hears

CheckVerdict = Literal["exact", "refused", "WRONG", "invalid"]


@dataclass(frozen=True)
class CheckRequest:
    """Describe a check."""

    source: str  # a config.json, its folder, or a model type of transformers
    tokens: int = 61  # in each of the two samples
    layers: int = 2  # at least so many; each kind of layer is there once at least
    head: str | None = None  # a key of HEADS; None for what the family is mostly used with
    # the "ring_attention" section; None for one made of the model's attention
    section: Mapping[str, Any] | None = None
    # values of the model's configuration, set before it is made small
    changes: Mapping[str, Any] = field(default_factory=dict)
    # one report each; where a model is refused, or one process differs from it, the others are left out
    forms: tuple[Form, ...] = ("plain",)
    checkpointing: Checkpointing = "none"  # of gradients, on one process, too
    inputs_embeds: bool = False  # the embeddings of the batch's tokens are given, instead of their ids
    stage: int = 0  # of ZeRO
    seed: int = 0  # of weights and batch


@dataclass(frozen=True)
class ModelReport:
    """Hold the result of a check."""

    source: str
    model: str  # its class, and the request's source
    # "exact"; "refused" with a typed error before anything wrong was computed; "WRONG"; "invalid" where the
    # model itself cannot be made or run on one process
    result: CheckVerdict
    reason: str = ""  # of a refusal or a crash, with the error's type
    differences: tuple[Difference, ...] = ()  # all that rounding does not explain, in the order of computing
    largest: Mapping[str, Difference] = field(default_factory=dict)  # the largest relative error of each kind
    # the same of one process, by which the verdict is reached, and how it was measured
    rounding: Mapping[str, Difference] = field(default_factory=dict)
    measured: str = ""
    tipped: tuple[Difference, ...] = ()  # by a threshold near which rounding decides, on one process, too
    # how the model's own "eager" attention differs from its default, with which the ring is then compared
    eager_differs: str = ""
    in_float64: str = ""  # if something is tipped: what a ring in float64 shows
    ring_size: int = 0
    tokens: int = 0
    layers: int = 0
    section: Mapping[str, Any] = field(default_factory=dict)
    form: Form = "plain"  # of the batch

    def as_json(self) -> dict[str, Any]:
        """Return the report as an object of JSON values."""
        values = asdict(self)
        for name in ("differences", "tipped"):
            values[name] = [difference._asdict() for difference in getattr(self, name)]
        for name in ("largest", "rounding"):
            values[name] = {kind: difference._asdict() for kind, difference in getattr(self, name).items()}
        return values


def check_forms(request: CheckRequest) -> list[ModelReport]:
    """Run the model on one process and on the ring of all ranks with every form of the batch. Collective."""
    # Every rank computes the whole run, too, and compares for itself: what differs on one rank only is found.
    # Returns the reports of all ranks together, the same on each. Raises nothing: a crash is in a report.
    reports = _gather_reports(_check_here(request, torch.float32))
    return [_looked_at_in_float64(request, report) if report.tipped else report for report in reports]


def _gather_reports(mine: list[ModelReport]) -> list[ModelReport]:
    """Return the reports of all ranks together. Collective."""
    all_ranks = gather_objects(mine)
    return [
        _merged([reports[number] for reports in all_ranks if number < len(reports)])
        for number in range(max(map(len, all_ranks)))
    ]


def _looked_at_in_float64(request: CheckRequest, tipped: ModelReport) -> ModelReport:
    """Return the report of a model some of whose thresholds rounding has tipped. Collective."""
    # Without ZeRO DeepSpeed reduces no gradients in float64 on a CPU.
    again = replace(request, forms=(tipped.form,), stage=max(1, request.stage))
    (wide,) = _gather_reports(_check_here(again, torch.float64))
    if wide.differences:
        return replace(
            tipped, result="WRONG", reason=f"in float64: {wide.reason}", differences=wide.differences,
            in_float64="WRONG",
        )  # fmt: skip
    return replace(tipped, in_float64="exact" if wide.result == "exact" else "cannot run")


def _check_here(request: CheckRequest, dtype: torch.dtype) -> list[ModelReport]:
    """Return this rank's reports."""
    deepspeed.utils.logger.setLevel(logging.ERROR)
    transformers.logging.set_verbosity_error()
    world = dist.get_world_size()
    try:
        source_config = read_config(request.source)
        images = request.head == "image-text"
        if images:
            least = LEAST_TOKENS.get(getattr(source_config, "model_type", ""), 0)
            request = replace(request, tokens=max(request.tokens, least))
        sounds = request.head == "seq2seq-lm" and hears(source_config)
        config = shrink(source_config, request.tokens, request.layers, request.changes, images, sounds)
        head = request.head or usual_head(config)
        if head == "seq2seq-lm" and config.model_type not in HEADS[head].families:
            raise RingConfigError.wrong(
                source_config.model_type,
                "two texts",
                f"{', '.join(source_config.sub_configs)}: no batch is made for it",
                "check its text part",
            )
        if head == "causal-lm" and getattr(config, "is_decoder", None) is False:
            config.is_decoder = True  # BERT's and Reformer's: they predict the next token as decoders only
        if head == "causal-lm" and getattr(config, "causal", None) is False:
            config.causal = config.is_decoder = True  # XLM's
        model = build(config, head, request.seed)
        of_text = "causal-lm" if sounds else head
        plain = make_batch(config, of_text, request.tokens, request.seed, has_a_loss(model, of_text))
        if sounds:
            plain = add_sounds(plain, model, request.seed)
        if images:
            plain = add_images(plain, model, request.seed)
        if "tree" in request.forms and (codebooks := getattr(config, "num_codebooks", 1)) > 1:
            raise RingConfigError.wrong(
                config.model_type,
                "one token at each place of a tree",
                f"{codebooks} codebooks",
                "check others",
            )
        if request.checkpointing != "none":
            _checkpoint(model, use_reentrant=request.checkpointing == "reentrant")
        if request.inputs_embeds:
            plain = _embedded(model, plain)
        if dtype == torch.float64:
            model = in_float64(model)
            plain = {key: x.double() if x.is_floating_point() else x for key, x in plain.items()}
    except RingConfigError as error:
        return [ModelReport(request.source, "", "invalid", str(error), ring_size=world)]
    section = dict(request.section) if request.section is not None else section_for(model, head)
    told: dict[str, Any] = {
        "source": request.source,
        "model": type(model).__name__,
        "ring_size": world,
        "tokens": request.tokens,
        "layers": getattr(config, "num_hidden_layers", 0),
    }
    causal = bool(section.get("pattern", {}).get("causal", True))
    forms: dict[bool, list[Form]] = {False: [], True: []}  # by whether they need documents
    for form in request.forms:
        forms[form == "packed" or (form == "padded" and not causal)].append(form)
    needed = [documents for documents in forms if forms[documents]]
    # An engine hooks its own; and Recurrent Gemma keeps states, which cannot be copied once it ran.
    models = {documents: (copy.deepcopy(model), copy.deepcopy(model)) for documents in needed}
    reports: list[ModelReport] = []
    for documents in needed:
        pattern = dict(section.get("pattern", {})) | ({"documents": True} if documents else {})
        form_section = section | ({"pattern": pattern} if pattern else {})
        batches = [
            make_form(form, plain, getattr(config, "pad_token_id", None) or 0, causal)
            for form in forms[documents]
        ]
        if not reports or reports[-1].result == "exact":
            with InFloat64() if dtype == torch.float64 else nullcontext():
                reports += _compared(*models[documents], batches, head, form_section, request.stage, told)
    order = {form: number for number, form in enumerate(request.forms)}
    return sorted(reports, key=lambda report: order[report.form])


def _checkpoint(model: PreTrainedModel, use_reentrant: bool) -> None:
    """Let the layers be checkpointed. They run again in the modes of torch functions of their first run.

    Raises:
        RingConfigError: the model has no such layers.
    """
    try:
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    except ValueError as error:
        raise RingConfigError(f"{model.config.model_type}: {error}") from error
    for module in model.modules():
        if hasattr(module, "_gradient_checkpointing_func"):
            checkpoint: Any = partial(_in_modes, module._gradient_checkpointing_func)
            module._gradient_checkpointing_func = checkpoint


def _in_modes(checkpoint: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
    modes = _get_current_function_mode_stack()  # TotalOrder, InFloat64; autograd runs without any

    def run(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            for mode in modes[len(_get_current_function_mode_stack()) :]:
                stack.enter_context(mode)
            return function(*args, **kwargs)

    return checkpoint(run, *args, **kwargs)


def _embedded(model: PreTrainedModel, plain: Batch) -> Batch:
    """Return a batch with inputs_embeds [B, T, E] instead of input_ids [B, T].

    Raises:
        RingConfigError: the model's embeddings take other inputs.
    """
    try:
        with torch.no_grad():
            inputs_embeds_BTE = model.get_input_embeddings()(plain["input_ids"])
    except Exception as error:  # Musicgen's is a list of tables
        raise RingConfigError(f"no inputs_embeds can be made: {type(error).__name__}: {error}") from error
    return {"inputs_embeds": inputs_embeds_BTE} | {key: x for key, x in plain.items() if key != "input_ids"}


def _compared(
    model: nn.Module,
    alone: nn.Module,
    batches: Sequence[Given],
    head: str,
    section: Mapping[str, Any],
    stage: int,
    told: dict[str, Any],
) -> list[ModelReport]:
    """Run some forms of a batch through one engine, and each on one process."""
    told = told | {"section": section}
    untouched = copy.deepcopy(alone)
    on_ring, fault = _on_the_ring(model, batches, head, section, stage)
    reports: list[ModelReport] = []
    for number, batch in enumerate(batches):
        about = told | {"form": batch.form}
        if number >= len(on_ring) and isinstance(fault, RingError) and isinstance(fault, ValueError):
            # a mistake of the caller
            reason = f"{type(fault).__name__}: {fault}"
            return [*reports, ModelReport(**about, result="refused", reason=reason)]
        try:
            expected = _alone(alone, batch, head)
        except Exception as error:
            reason = f"alone: {type(error).__name__}: {error}"
            return [*reports, ModelReport(**about, result="invalid", reason=reason)]
        run = partial(_alone, batch_form=batch, head=head)
        by_default = _differs_from_eager(untouched, batch, head, expected)
        if by_default:
            run = partial(run, implementation=_implementation(untouched))
            expected = run(copy.deepcopy(untouched))
            about["eager_differs"] = _name_first(by_default)
        if number >= len(on_ring):
            reason = f"crash: {type(fault).__name__}: {fault}"
            return [*reports, ModelReport(**about, result="WRONG", reason=reason)]
        differences = compare(on_ring[number], expected)
        rounding = measure_rounding(untouched, run, expected)
        larger = wrong = rounding.beyond(differences)
        if larger and next(alone.parameters()).dtype == torch.float32:
            wrong = measure_moved_rounding(untouched, run, expected).jumps(larger)
        reports.append(
            ModelReport(
                **about,
                result="WRONG" if wrong else "exact",
                reason=_name_first(wrong),
                differences=tuple(wrong),
                largest=largest(differences),
                rounding=largest(list(rounding.errors)),
                measured=rounding.measured,
                tipped=() if wrong else tuple(larger),
            )
        )
    return reports


def _differs_from_eager(model: nn.Module, batch: Given, head: str, eager: Numbers) -> list[Difference]:
    """Return how the attention that the model has by default differs from its "eager" one, in float64.

    Two kinds of attention of one model should agree; Falcon's do not with alibi. A run without a ring has the
    default, which is then what a ring is compared with.
    """
    implementation = _implementation(model)
    if implementation == "eager":
        return []
    allowed = Tolerance.for_dtype(torch.float32)
    try:
        default = _alone(copy.deepcopy(model), batch, head, implementation)
        if not beyond(compare(default, eager), allowed):
            return []
        with InFloat64():
            wide = [_alone(in_float64(model), batch, head, name) for name in (implementation, "eager")]
    except Exception:  # it cannot run so, or not in float64
        return []
    return beyond(compare(*wide), allowed)


def _implementation(model: nn.Module) -> str:
    name: str = model.config._attn_implementation  # type: ignore[union-attr, assignment]
    return name


def _merged(reports: list[ModelReport]) -> ModelReport:
    """Return the report of all ranks: the worst, and WRONG if they do not agree on the result."""
    results = {report.result for report in reports}
    if len(results) > 1 or len(reports) < dist.get_world_size():
        text = "; ".join(
            f"rank {rank}: {report.result} {report.reason}" for rank, report in enumerate(reports)
        )
        worst = max(reports, key=lambda report: len(report.differences))
        return replace(worst, result="WRONG", reason=f"ranks differ: {text}")
    return max(reports, key=lambda report: max((x.error for x in report.largest.values()), default=0.0))


def _alone(model: nn.Module, batch_form: Given, head: str, implementation: str = "eager") -> Numbers:
    """Run the model with its own attention, written out ("eager") or another, on this process."""
    model.set_attn_implementation(implementation)  # type: ignore[operator]
    model.zero_grad()
    dtype = next(model.parameters()).dtype  # of images, too
    # a copy: GIT writes into the inputs_embeds that it is given
    batch = {
        key: x.to(dtype, copy=True) if x.is_floating_point() else x for key, x in batch_form.alone.items()
    }
    with recording(model, encoder_modules(model)) as layers, TotalOrder():
        if "labels" in batch:
            output = model(**batch)
            loss = output.loss
        else:
            labels = batch.pop("shift_labels")
            output = model(**batch)
            loss = torch.nn.functional.cross_entropy(
                _logits(output).flatten(0, 1), labels.flatten(), ignore_index=IGNORE
            )
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    recorded = {name: batch_form.take_alone(x) for name, x in layers.items()}
    return Numbers(batch_form.take_alone(_logits(output).detach()), float(loss.detach()), recorded, gradients)


def _on_the_ring(
    model: nn.Module, batches: Sequence[Given], head: str, section: Mapping[str, Any], stage: int
) -> tuple[list[Numbers], Exception | None]:
    """Return what the engine computes of each batch, up to the first that it raises for, and that error."""
    results: list[Numbers] = []
    engine = None
    try:
        engine, _, _, _ = initialize(
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
            config={
                "train_micro_batch_size_per_gpu": SAMPLES,
                "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
                "zero_allow_untested_optimizer": True,
                "steps_per_print": 10**9,
                "sequence_parallel_size": dist.get_world_size(),
                "ring_attention": {"hop_timeout_seconds": 60, "heartbeat_timeout_seconds": 60}
                | dict(section),
            },
        )
        if section.get("attention") == "as_is":  # the rest of the graph as it is: no compiler, no rounding
            engine.compile(backend="ds_ring", compile_kwargs={"options": {"inner": "eager"}})
        for batch in batches:
            results.append(_trained_once(engine, batch, head))
    except Exception as error:
        return results, error
    finally:
        if engine is not None:
            engine.ring.run_mesh.close()
    return results, None


def _trained_once(engine: Any, batch: Given, head: str) -> Numbers:
    session, whole = engine.ring, batch.ring
    # a graph has no layers to record
    recorded: AbstractContextManager[dict[str, Tensor]] = (
        nullcontext({}) if engine.is_compiled else recording(engine.module, encoder_modules(engine.module))
    )
    # A model on one rank keeps its own attention, which must choose as one process does.
    order = TotalOrder() if dist.get_world_size() == 1 else nullcontext()
    with recorded as layers, order:
        if head == "sequence-classification":
            local = session.shard_batch({key: x for key, x in whole.items() if key != "labels"})
            output = engine(**local, labels=whole["labels"])
            loss, mean = output.loss, output.loss
        elif "labels" in whole:
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
            gradients[name] = gradient.detach().float().to("cpu", copy=True)
    engine.step()  # at a learning rate of 0
    logits = _logits(output).detach()
    if head != "sequence-classification":
        logits = batch.take_ring(session.gather(logits).cpu())
    pair = session.batches.current.encoder is not None
    outputs = {
        name: batch.take_ring(session.gather(x, encoder=pair and "encoder." in name).cpu())
        for name, x in layers.items()
    }
    return Numbers(logits.cpu(), float(mean.detach()), outputs, gradients)


def _logits(output: Any) -> Tensor:
    logits: Tensor = output.logits if hasattr(output, "logits") else output.last_hidden_state
    # Chameleon gives the least number for codes of images, beside which no error would be seen.
    return logits.masked_fill(logits == torch.finfo(logits.dtype).min, 0)


def _name_first(wrong: list[Difference]) -> str:
    """Name the layer that differs first, and the parameter whose gradient differs most."""
    if not wrong:
        return ""
    worst = max(
        (difference for difference in wrong if difference.kind == "gradient"),
        key=lambda difference: difference.error,
        default=None,
    )
    return f"{len(wrong)} differ: first {wrong[0]}" + (f", most {worst}" if worst is not None else "")
