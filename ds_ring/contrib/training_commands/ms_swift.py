"""ms-swift's `swift sft` and `swift pt` on a ring: the file for `--external_plugins`.

    swift sft --external_plugins "$(python -m ds_ring.contrib.training_commands ms_swift)" \
        --deepspeed ds_config.json ...

Owns what ms-swift computes outside of Trainer: its samplers, its token accuracy and its loss of several
replicas. `ds_ring.enable` does the rest. README.md has the arguments that are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ds_ring.data.outputs import gather_computed
from ds_ring.engines.deepspeed.enable import enable
from ds_ring.engines.trainers.accelerate import sequence_ranks
from ds_ring.engines.trainers.transformers import counting_replicas
from ds_ring.errors import RingConfigError
from ds_ring.patches import PatchTable, apply, patch

SWIFT = PatchTable("ms-swift", ">=4.6,<5")
_swift_patch = partial(patch, stage="at_enable", when="the file is passed as --external_plugins")
_DISPATCHER = SWIFT.imported("swift.dataloader.DataLoaderDispatcher")
_replicas = _swift_patch(
    _DISPATCHER, "world_size", kind="replaced", feature="streams", reason="rank 0 reads a batch a replica"
)
_padding_free = patch(
    SWIFT.given("args", "swift.arguments.SftArguments"), "padding_free", stage="around_init", kind="set",
    feature="packing.rows", reason="packed samples are rows without padding", when="packing",
)  # fmt: skip
_METHODS = ("causal_lm",)  # keys of TrainerFactory's tables whose runs were compared with one process


def install() -> None:
    """Put the runs of this process on a ring; ms-swift calls it by importing the file."""
    enable()
    apply(
        _checked, _with_any_attention, _no_logits_to_keep, _by_replicas, _scattered,
        _share_replica_workers, _with_items,
        _replicas.to(property(lambda _: dist.get_world_size() // sequence_ranks())),
    )  # fmt: skip


@_swift_patch(
    SWIFT.imported("swift.trainers.TrainerFactory"), "get_training_args", feature="arguments",
    reason="refuses methods and arguments that a ring cannot honour",
)  # fmt: skip
def _checked(make: Callable[[Any], Any], args: Any) -> Any:
    """Return the arguments of Trainer, or refuse what the run was asked for."""
    method = getattr(args, "rlhf_type", args.task_type)
    if method not in _METHODS:
        raise RingConfigError.wrong(
            "ms-swift", "swift sft or swift pt of a causal_lm", str(method), "or leave out the plug-in"
        )
    if args.sequence_parallel_size > 1:
        raise RingConfigError.wrong(
            "--sequence_parallel_size", "1", args.sequence_parallel_size,
            'it starts ms-swift\'s own ring; set "sequence_parallel_size" of the DeepSpeed JSON',
        )  # fmt: skip
    if args.use_logits_to_keep:
        raise RingConfigError.wrong(
            "--use_logits_to_keep", "false", True, "it cuts the labels to fewer tokens than input_ids"
        )
    return make(args)


@_swift_patch(
    SWIFT.imported("swift.arguments.SftArguments"), "_check_padding_free", kind="replaced", feature="packing",
    reason='"documents" of the JSON\'s pattern, not FlashAttention, separates packed samples',
)  # fmt: skip
def _with_any_attention(args: Any) -> None:
    apply(_padding_free.to(args.padding_free or args.packing), args=args)


@_swift_patch(
    SWIFT.imported("swift.trainers.mixin.SwiftMixin"), "get_use_logits_to_keep", kind="replaced",
    feature="labels", reason="labels have as many tokens as input_ids: a ring cuts both",
)  # fmt: skip
def _no_logits_to_keep(trainer: Any, default_value: bool = True) -> bool:
    return False


@_swift_patch(
    SWIFT.imported("swift.dataloader.BatchSamplerShard"), "__init__", feature="samples",
    reason="ranks of a sequence read the samples of one replica, as those of tensor parallelism do",
)  # fmt: skip
def _by_replicas(
    start: Callable[..., None], sampler: Any, *args: Any, tp_size: int = 1, **kwargs: Any
) -> None:
    start(sampler, *args, tp_size=tp_size * sequence_ranks(), **kwargs)


@_swift_patch(
    _DISPATCHER, "_scatter_object_list", kind="replaced", feature="streams.batches",
    reason="ranks of a sequence get the batch of their replica",
)  # fmt: skip
def _scattered(loader: Any, batches: list[Any] | None) -> Any:
    ranks, mine = sequence_ranks(), [None]
    dist.scatter_object_list(
        mine, None if batches is None else [batch for batch in batches for _ in range(ranks)]
    )
    return mine[0]


@_swift_patch(
    SWIFT.imported("swift.trainers.mixin.DataLoaderMixin"), "get_train_dataloader", feature="workers",
    reason="workers of a sequence's ranks draw alike",
)  # fmt: skip
def _share_replica_workers(make: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
    with counting_replicas(trainer):
        return make(trainer, *args, **kwargs)


class _Predicted:
    """Stand for the logits of a batch of which ms-swift reads nothing but the most likely tokens."""

    def __init__(self, ids_BT: Tensor) -> None:
        self._ids_BT = ids_BT

    def argmax(self, dim: int) -> Tensor:
        """Return the most likely token after each token."""
        return self._ids_BT


@_swift_patch(
    SWIFT.imported("swift.template.base.Template"), "compute_sft_loss", kind="replaced", feature="loss",
    reason="divides by the labelled tokens of all replicas; gathers predicted tokens in place of logits",
)  # fmt: skip
def _with_items(
    template: Any, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None, trainer: Any = None
) -> Any:
    """Compute a batch's outputs; ms-swift scales a mean, but replicas have different numbers of labels."""
    labelled = "labels" in inputs  # else ms-swift computes the loss from all logits
    items = {"num_items_in_batch": num_items_in_batch} if labelled and num_items_in_batch is not None else {}
    outputs = model(**inputs, **items)
    if labelled and (trainer.model.training or trainer.compute_metrics is None):
        ids_BT = gather_computed(outputs, "logits", lambda logits: logits.argmax(dim=-1))
        outputs.logits = None if ids_BT is None else _Predicted(ids_BT)
    return outputs


if not __name__.startswith("ds_ring."):  # ms-swift imports the file by a name of its own
    install()
