"""Make transformers' Trainer count the ranks of one sequence as one data replica.

It counts processes in the batch sizes of the DeepSpeed JSON and of its logs. Evaluations that read nothing
but the loss gather no logits.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from functools import partial
from typing import Any

from ds_ring.config.json_text import SECTION, SP_KEY
from ds_ring.config.section import RingConfig
from ds_ring.data.packing import DOCUMENT_IDS
from ds_ring.errors import RingConfigError
from ds_ring.patches import PatchTable, applied, apply, patch, undo
from ds_ring.plugin import ROW_KINDS

TRAINER = PatchTable("transformers", ">=4.56")
_ARGUMENTS = TRAINER.given("arguments", "transformers.TrainingArguments")
_OF_TRAINER = TRAINER.given("trainer", "transformers.trainer.Trainer")
_trainer_patch = partial(
    patch, TRAINER.imported("transformers.trainer.Trainer"), stage="at_enable",
    when="transformers.trainer is imported",
)  # fmt: skip
_world_size = patch(
    _ARGUMENTS, "__class__", stage="around_init", kind="set", feature="generation batch",
    reason="world_size counts data replicas when TRL reads it for the size of its generation batch",
    when="TRL samples from the model; taken back when it was read",
)  # fmt: skip
_flops_share = patch(
    _OF_TRAINER, "current_flos", stage="around_call", kind="set", feature="flops.share",
    reason="this rank's share of its replica's operations", when="they are added",
)  # fmt: skip
_loader_arguments = patch(
    _ARGUMENTS, "__class__", stage="around_call", kind="set", feature="loaders.arguments",
    reason="world_size and process_index count data replicas; taken back when the loader is made",
)  # fmt: skip

BACKEND = "ds_ring"  # of ParallelismConfig
_PRODUCT = "train_batch_size"
_UNCOMPARED = "trl.experimental."
_ENGINES = {
    "use_vllm": "vLLM samples on each rank by itself, and the ranks of a sequence need the same rollouts",
    "use_transformers_continuous_batching": "generate_batch has a cache that is not on the ring",
    "use_transformers_paged": "generate_batch has a cache that is not on the ring",
}


def write_ring_ranks(json: dict[str, Any], parallel: Any) -> None:
    """Write the ranks of `ParallelismConfig(sp_size=..., sp_backend="ds_ring")` into a DeepSpeed JSON.

    Raises:
        RingConfigError: the JSON asks for another number of ranks.
    """
    ranks = getattr(parallel, "ring_ranks", None)
    if ranks is None:
        return
    configured = json.setdefault(SP_KEY, ranks)
    if configured not in (ranks, "auto"):
        raise RingConfigError(f'parallelism_config: expected {configured} ranks ("{SP_KEY}"), got {ranks}')
    json[SP_KEY] = ranks
    json.setdefault(SECTION, {})


def enable_trainer_config() -> None:
    """Let DeepSpeed work out train_batch_size: TrainingArguments would multiply by all ranks."""
    apply(_without_product)


@patch(
    TRAINER.imported("transformers.integrations.deepspeed.HfTrainerDeepSpeedConfig"),
    "trainer_config_process", stage="at_enable", feature="JSON of Trainer",
    reason="train_batch_size is by replicas; refuses other engines that sample for TRL",
)  # fmt: skip
def _without_product(process: Callable[..., None], json: Any, args: Any, *others: Any, **kwargs: Any) -> None:
    product, ranks = "auto", 1
    write_ring_ranks(json.config, getattr(args, "parallelism_config", None))
    if SECTION in json.config:
        _refuse_other_engines(args)
        product = json.config.pop(_PRODUCT, "auto")
        # As a number: from_pretrained at ZeRO 3 hands the JSON to DeepSpeed as it is.
        json.config[SP_KEY] = ranks = RingConfig.from_deepspeed(json.config).sequence_parallel_size
    process(json, args, *others, **kwargs)
    if product != "auto":
        json.config[_PRODUCT] = product
    if ranks > 1 and hasattr(args, "generation_batch_size"):
        _count_replicas(args, ranks)


def _refuse_other_engines(args: Any) -> None:
    """Refuse engines that sample rollouts outside the ring, and methods of TRL that no test compares."""
    kind = type(args)
    for name, why in _ENGINES.items():
        if getattr(args, name, False):
            raise RingConfigError.wrong(
                kind.__name__, f"{name}=False", f"True: {why}", "use the model's own generate"
            )
    uncompared = (base for base in kind.__mro__ if base.__module__.startswith(_UNCOMPARED))
    # a class has its own annotations alone; vars() has none of them from Python 3.14 on
    if any("temperature" in inspect.get_annotations(base) for base in uncompared):
        raise RingConfigError(
            f"{kind.__name__}: expected a method that has been compared with one process, got another one;"
            " use GRPOTrainer, RLOOTrainer or DistillationTrainer, or leave out ds_ring.enable()"
        )


def _count_replicas(args: Any, ranks: int) -> None:
    """Let TRL work out `generation_batch_size` by replicas: the next read of world_size is their number."""
    kind = type(args)

    def world_size(arguments: Any) -> int:
        undo(changes)
        return int(arguments.world_size) // ranks

    counting = type(kind.__name__, (kind,), {"world_size": property(world_size)})
    changes = apply(_world_size.to(counting), arguments=args)


@functools.cache
def enable_trainer() -> None:
    """Replace what Trainer works out from the number of processes; once, when it has been imported."""
    apply(
        _batch_size,
        _no_sp_size,
        _reading_the_loss,
        _add_up_flops,
        _counting_steps,
        _make_replica_loaders,
        _with_documents,
    )


@_trainer_patch(
    "get_total_train_batch_size", feature="batch size", reason="divides by the ranks of a sequence"
)
def _batch_size(total: Callable[..., int], trainer: Any, args: Any) -> int:
    return total(trainer, args) // int(trainer.accelerator.sequence_ranks)


@_trainer_patch(
    "get_sp_size", kind="added", feature="batch size.ranks",  # transformers 4.56 has no such method
    reason="the ranks of a sequence are one replica already: Trainer would divide by them again",
)  # fmt: skip
def _no_sp_size(trainer: Any) -> int:
    return 1


@_trainer_patch(
    "store_flos", feature="flops",
    reason="adds the operations of all ranks, each of which has counted its sequence's whole batch",
)  # fmt: skip
def _add_up_flops(store: Callable[[Any], None], trainer: Any) -> None:
    """Add up the operations of a ring's ranks to those of its replica: each has counted the whole batch."""
    share = trainer.current_flos / trainer.accelerator.sequence_ranks
    apply(_flops_share.to(share), trainer=trainer)
    store(trainer)


@_trainer_patch(
    "_get_dataloader", feature="loaders",
    reason="ranks of a sequence read the samples of one replica (batch_rebalance); their workers draw alike",
)  # fmt: skip
def _make_replica_loaders(make: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """Make a loader, which reads its share of the samples from the arguments: let these count replicas."""
    replicas, kind = trainer.accelerator, type(trainer.args)
    counts = {
        "world_size": property(lambda _: replicas.num_processes),
        "process_index": property(lambda _: replicas.process_index),
    }
    with applied(_loader_arguments.to(type(kind.__name__, (kind,), counts)), arguments=trainer.args):
        return make(trainer, *args, **kwargs)


@_trainer_patch(
    "_remove_unused_columns", "_get_collator_with_removed_columns", feature="columns",
    reason='keeps the columns that name the documents of packed rows, under "documents": true',
)  # fmt: skip
def _with_documents(remove: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """Remove the columns that neither a model's forward nor the ring takes."""
    json = getattr(trainer.args.hf_deepspeed_config, "config", {})
    if SECTION in json and RingConfig.from_deepspeed(json).pattern.documents:
        trainer._set_signature_columns_if_needed()
        trainer._signature_columns.extend({DOCUMENT_IDS, *ROW_KINDS} - {*trainer._signature_columns})
    return remove(trainer, *args, **kwargs)


@_trainer_patch(
    "evaluate", "predict", feature="evaluation steps",
    reason="counts the steps of an evaluation by processes",
)  # fmt: skip
def _counting_steps(evaluate: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """Evaluate; the steps of the logs are those of replicas."""
    with applied(partial(_speeds_by_replica, trainer)):
        return evaluate(trainer, *args, **kwargs)


@patch(
    TRAINER.imported("transformers.trainer"), "speed_metrics", stage="around_call",
    feature="evaluation steps.speeds", reason="counts them by replicas; taken back after the evaluation",
)  # fmt: skip
def _speeds_by_replica(
    trainer: Any, speeds: Callable[..., Any], name: str, start: float, num_samples: Any = None, **counts: Any
) -> Any:
    if num_samples is not None and "num_steps" in counts:
        batch = trainer.args.eval_batch_size * trainer.accelerator.num_processes
        counts["num_steps"] = math.ceil(num_samples / batch)
    return speeds(name, start, num_samples=num_samples, **counts)


@_trainer_patch(
    "prediction_step", feature="only the loss",
    reason="an evaluation that reads nothing but the loss gathers no logits",
)  # fmt: skip
def _reading_the_loss(
    predict: Callable[..., Any],
    trainer: Any,
    model: Any,
    inputs: Any,
    prediction_loss_only: bool,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Evaluate a batch; with `prediction_loss_only` drop all outputs but the loss."""
    # Trainer walks over all outputs before it drops them: logits would be gathered.
    if not prediction_loss_only:
        return predict(trainer, model, inputs, prediction_loss_only, *args, **kwargs)
    with applied(_loss_alone, trainer=trainer):
        return predict(trainer, model, inputs, prediction_loss_only, *args, **kwargs)


@patch(
    _OF_TRAINER, "compute_loss", stage="around_loss", feature="only the loss.call",
    reason="leaves out all but the loss; taken back after the step",
    when="an evaluation reads nothing but the loss",
)  # fmt: skip
def _loss_alone(compute_loss: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    outputs = compute_loss(*args, **kwargs)
    return (outputs[0], {}) if isinstance(outputs, tuple) else outputs
