"""LLaMA-Factory's `llamafactory-cli train` on a ring: the file that starts it.

    FORCE_TORCHRUN=1 python "$(python -m ds_ring.contrib.training_commands llama_factory)" train sft.yaml

LLaMA-Factory has no argument for plug-ins. Its launcher starts this file on each rank in place of its own.
There the file puts the run on a ring and calls LLaMA-Factory's `run_exp`. README.md has what runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

from torch import Tensor

from ds_ring.engines.deepspeed.enable import enable
from ds_ring.errors import RingConfigError
from ds_ring.patches import PatchTable, apply, patch

FACTORY = PatchTable("llamafactory", ">=0.9.5")
_TUNER = FACTORY.imported("llamafactory.train.tuner")
_factory_patch = partial(patch, stage="at_enable", when="the file starts the run")
_started_file = patch(
    FACTORY.imported("llamafactory.launcher"), "__file__", stage="at_enable", kind="replaced",
    feature="launcher", reason="the file that torchrun starts on each rank",
)  # fmt: skip
_STAGES = ("pt", "sft")  # whose runs were compared with one process
# Arguments with another trainer, or another forward pass, than those of Trainer.
_REFUSED = ("use_mca", "use_hyper_parallel", "use_unsloth", "use_kt", "use_asft_loss", "shift_attn")


def install() -> None:
    """Put the runs of this process on a ring."""
    enable()
    apply(_checked, _make_padding_mask, _refuse_ray)


@_factory_patch(
    _TUNER,
    "get_train_args",
    feature="arguments",
    reason="refuses stages and arguments that a ring cannot honour",
)
def _checked(parse: Callable[..., tuple[Any, ...]], *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """Return the arguments of a run, or refuse what it was asked for."""
    parsed = parse(*args, **kwargs)
    arguments = {name: value for group in parsed for name, value in vars(group).items()}
    if arguments["stage"] not in _STAGES:
        raise RingConfigError.wrong(
            "LLaMA-Factory", f"stage {' or '.join(_STAGES)}", arguments["stage"], "or leave out the plug-in"
        )
    refused = [name for name in _REFUSED if arguments.get(name)]
    if refused:
        raise RingConfigError.wrong("LLaMA-Factory", f"no {refused[0]} on a ring", "true", "leave it out")
    return parsed


@_factory_patch(
    _TUNER, "_ray_training_function", kind="replaced", feature="Ray",
    reason="its workers start without the plug-in: raises",
)  # fmt: skip
def _refuse_ray(*args: Any, **kwargs: Any) -> None:
    raise RingConfigError.wrong("LLaMA-Factory", "torchrun", "use_ray", "set FORCE_TORCHRUN=1")


@_factory_patch(
    FACTORY.imported("llamafactory.data.collator"), "prepare_4d_attention_mask", kind="replaced",
    feature="packing", reason='position_ids separate packed samples, by "documents" of the JSON\'s pattern',
)  # fmt: skip
def _make_padding_mask(samples_BT: Tensor, dtype: Any) -> Tensor:
    """Return which tokens are real: neat_packing numbers the samples of a row from 1; 0 is padding."""
    return (samples_BT != 0).long()


if __name__ == "__main__":
    if sys.argv[1:2] == ["train"]:
        apply(_started_file.to(__file__))
        import_module("llamafactory.launcher").launch()
    else:
        install()
        import_module("llamafactory.train.tuner").run_exp()
