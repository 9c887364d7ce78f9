"""The tables of everything that ds_ring replaces or wraps in accelerate, in transformers' Trainer and in TRL.

`ds_ring.enable()` applies the rows of classes for good, once a process; those of objects are applied where
accelerate makes the object. accelerate.py, transformers.py and trl.py have what is put there.
"""

from __future__ import annotations

from ds_ring.integrations.adapter import Patch, PatchTable

ACCELERATE = PatchTable(
    "accelerate",
    ">=1.15",
    [
        Patch(
            "accelerate.Accelerator.__init__", "at_enable", "wrapped", "ring",
            "puts every Accelerator on a ring; raises without DeepSpeed and our section",
        ),
        Patch(
            "accelerate.state.PartialState._prepare_backend", "at_enable", "wrapped", "backend",
            "accelerate 1.15 knows DeepSpeed on accelerators only: gloo on CPUs",
        ),
        Patch(
            "accelerate.utils.operations._gpu_gather", "at_enable", "wrapped", "tensors",
            "gathers each data replica once, for whoever imported gather",
        ),
        Patch(
            "accelerate.utils.operations._gpu_gather_object", "at_enable", "wrapped", "objects",
            "gathers each data replica once, for whoever imported gather_object",
        ),
        Patch(
            "accelerate.utils.random.AcceleratorState", "at_enable", "replaced", "seeds",
            "set_seed(device_specific=True) gives the ranks of a sequence one seed",
        ),
        Patch(
            "accelerate.parallelism_config.ParallelismConfig.__post_init__", "at_enable", "wrapped",
            "parallelism", 'takes out the ranks of the backend "ds_ring", which accelerate does not know',
        ),
        *(
            Patch(
                f"parallel.{axis}_{what}", "at_enable", "set", f"parallelism.{axis}_{what}",
                "no other parallelism is left to accelerate", when=f'{axis}_backend="ds_ring"',
            )
            for axis in ("sp", "cp")
            for what in ("size", "backend")
        ),
        Patch(
            "parallel.ring_ranks", "at_enable", "added", "parallelism.ranks",
            "the ranks of a sequence", when='sp_backend="ds_ring" or cp_backend="ds_ring"',
        ),
        Patch(
            "accelerator.dataloader_config.dispatch_batches", "around_init", "set", "own samples",
            "each rank reads its samples",
        ),
        Patch(
            "accelerator.__class__", "around_init", "set", "replicas",
            "num_processes, process_index, prepare_data_loader, reduce and _prepare_deepspeed count data"
            " replicas",
        ),
        Patch(
            "sampler.generator", "in_loader", "set", "one order",
            "one order on all ranks", when="it has none and there is one replica",
        ),
        Patch(
            "sampler.initial_seed", "in_loader", "set", "one order.seed",
            "one order on all ranks", when="accelerate seeds the sampler by itself",
        ),
        Patch(
            "loader.base_dataloader", "in_loader", "set", "last batch",
            "counts the samples of its last batch, as accelerate's dispatcher does",
            when="the data set is iterable",
        ),
        Patch(
            "loader.remainder", "in_loader", "set", "last batch.samples",
            "their number: gather_for_metrics leaves out what fills a batch up",
            when="the data set is iterable and was read to its end",
        ),
        Patch(
            "shard.dataset", "in_loader", "set", "last batch.counted",
            "counts its samples", when="the data set is iterable and there are several replicas",
        ),
        Patch(
            "scheduler.replicas", "at_initialize", "added", "number of replicas",
            "the steps of one call of step",
        ),
        Patch(
            "scheduler.__class__", "at_initialize", "set", "scheduler", "steps once for each replica",
        ),
    ],
    classes={
        "accelerator": "accelerate.Accelerator",
        "accelerator.dataloader_config": "accelerate.utils.DataLoaderConfiguration",
        "parallel": "accelerate.parallelism_config.ParallelismConfig",
        "loader": "accelerate.data_loader.DataLoaderShard",
        "shard": "accelerate.data_loader.IterableDatasetShard",
        "sampler": "accelerate.data_loader.SeedableRandomSampler",
        "scheduler": "accelerate.scheduler.AcceleratedScheduler",
    },
)  # fmt: skip

TRAINER = PatchTable(
    "transformers",
    ">=5",
    [
        Patch(
            "transformers.integrations.deepspeed.HfTrainerDeepSpeedConfig.trainer_config_process",
            "at_enable", "wrapped", "JSON of Trainer",
            "train_batch_size is by replicas; refuses other engines that sample for TRL",
        ),
        Patch(
            "arguments.__class__", "around_init", "set", "generation batch",
            "world_size counts data replicas when TRL reads it for the size of its generation batch",
            when="TRL samples from the model; taken back when it was read",
        ),
        Patch(
            "transformers.trainer.Trainer.get_total_train_batch_size", "at_enable", "wrapped", "batch size",
            "divides by the ranks of a sequence", when="transformers.trainer is imported",
        ),
        Patch(
            "transformers.trainer.Trainer.prediction_step", "at_enable", "wrapped", "only the loss",
            "an evaluation that reads nothing but the loss gathers no logits",
            when="transformers.trainer is imported",
        ),
        Patch(
            "trainer.compute_loss", "around_loss", "wrapped", "only the loss.call",
            "leaves out all but the loss; taken back after the step",
            when="an evaluation reads nothing but the loss",
        ),
        Patch(
            "transformers.trainer.Trainer.store_flos", "at_enable", "wrapped", "flops",
            "adds the operations of all ranks, each of which has counted its sequence's whole batch",
            when="transformers.trainer is imported",
        ),
        Patch(
            "trainer.current_flos", "around_call", "set", "flops.share",
            "this rank's share of its replica's operations", when="they are added",
        ),
        *(
            Patch(
                f"transformers.trainer.Trainer.{method}", "at_enable", "wrapped", "evaluation steps",
                "counts the steps of an evaluation by processes", when="transformers.trainer is imported",
            )
            for method in ("evaluate", "predict")
        ),
        Patch(
            "transformers.trainer.Trainer._get_dataloader", "at_enable", "wrapped", "loaders",
            "ranks of a sequence read the samples of one replica (batch_rebalance); their workers draw alike",
            when="transformers.trainer is imported",
        ),
        Patch(
            "arguments.__class__", "around_call", "set", "loaders.arguments",
            "world_size and process_index count data replicas; taken back when the loader is made",
        ),
        Patch(
            "transformers.trainer.speed_metrics", "around_call", "wrapped", "evaluation steps.speeds",
            "counts them by replicas; taken back after the evaluation",
        ),
    ],
    classes={"arguments": "transformers.TrainingArguments", "trainer": "transformers.trainer.Trainer"},
)  # fmt: skip

TRL = PatchTable(
    "trl",
    ">=1.16",
    [
        Patch(
            "trl.models.utils._ForwardRedirection.__call__", "at_enable", "wrapped", "redirection",
            "runs the loss of a distillation in a forward pass of its batch, which a ring can cut; calls the"
            " original without a ring", when="trl.models.utils is imported",
        ),
        Patch(
            "model.forward", "around_forward", "replaced", "redirection.model",
            "computes that loss; taken back after the pass",
        ),
        Patch(
            "base", "before_forward", "hook", "redirection.base",
            "gives the backbone this rank's tokens; taken back after the pass", options=("prepend",),
        ),
        Patch("base", "after_forward", "hook", "redirection.base", "a token more, which TRL drops"),
    ],
    classes={"model": "transformers.PreTrainedModel", "base": "transformers.PreTrainedModel"},
)  # fmt: skip
