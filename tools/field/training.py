"""Train one step and evaluate with whole trainers on two ranks, and compare with one process.

Half of a row's tokens have no label, all in the first shards: a mean of the ranks' means is another loss. The
step is SGD without momentum or clipping, so that the change of the weights is the gradient, with its scale.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import llama

from ds_ring_launcher.compare.group import Verdict

TOKENS, VOCAB, RATE = 64, 128, 1e-2
BOUNDS = {"evaluation loss": 1e-4, "loss": 1e-4, "gradients": 1e-3}  # relative; weights are float32
_DEEPSPEED = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 0.0,
    "zero_optimization": {"stage": 0},
    "zero_allow_untested_optimizer": True,
}


def rows() -> list[dict[str, torch.Tensor]]:
    """Return two rows: input ids, and labels from the middle on."""
    ids = torch.randint(VOCAB, (2, TOKENS), generator=torch.Generator().manual_seed(3))
    labels = ids.masked_fill(torch.arange(TOKENS) < TOKENS // 2 + 5, -100)
    positions = torch.arange(TOKENS)
    return [
        {"input_ids": a, "labels": b, "position_ids": positions} for a, b in zip(ids, labels, strict=True)
    ]


def plain(arguments: dict[str, Any]) -> None:
    """Train in one process."""


def with_ds_ring(arguments: dict[str, Any]) -> None:
    """Train on a ring of ds_ring: two lines and two keys of the JSON."""
    import ds_ring

    ds_ring.enable()
    arguments["deepspeed"] = {**_DEEPSPEED, "sequence_parallel_size": 2, "ring_attention": {}}


def accelerate_sp(arguments: dict[str, Any]) -> None:
    """Train with accelerate's sequence parallelism, which is DeepSpeed's Ulysses."""
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.utils import DeepSpeedSequenceParallelConfig
    from deepspeed import comm

    comm.init_distributed("gloo", verbose=False)  # on CPU ranks accelerate leaves it out
    handler = DeepSpeedSequenceParallelConfig(
        sp_seq_length=TOKENS, sp_seq_length_is_variable=False, sp_attn_implementation="sdpa"
    )
    arguments["parallelism_config"] = ParallelismConfig(sp_size=2, sp_backend="deepspeed", sp_handler=handler)
    arguments["deepspeed"] = {**_DEEPSPEED, "sequence_parallel_size": 2}


def accelerate_cp(arguments: dict[str, Any]) -> None:
    """Train with accelerate's context parallelism, which is torch's, under FSDP2."""
    from accelerate.parallelism_config import ParallelismConfig

    arguments["parallelism_config"] = ParallelismConfig(cp_size=2)
    arguments |= {"fsdp": "full_shard", "fsdp_config": {"fsdp_version": 2}}


TRAINERS: dict[str, Callable[[dict[str, Any]], None]] = {
    "Trainer, ds_ring": with_ds_ring,
    "Trainer, accelerate's DeepSpeed Ulysses": accelerate_sp,
    "Trainer, accelerate's context parallel": accelerate_cp,
}
WAYS = {"one process": plain, **TRAINERS}


def be_rank(way: str, path: Path) -> None:
    """Train and evaluate; rank 0 writes what it found."""
    torch.set_num_threads(1)
    import deepspeed
    from transformers import Trainer, TrainingArguments

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # is compiled for two minutes, not used
    arguments: dict[str, Any] = {
        "output_dir": str(path.parent / "out"), "use_cpu": True, "max_steps": 1, "learning_rate": RATE,
        "lr_scheduler_type": "constant", "optim": "sgd", "max_grad_norm": 0.0, "report_to": [],
        "per_device_train_batch_size": 1, "per_device_eval_batch_size": 1, "logging_steps": 1,
        "save_strategy": "no", "disable_tqdm": True, "dataloader_pin_memory": False, "seed": 0,
    }  # fmt: skip
    WAYS[way](arguments)
    model = llama(TOKENS, VOCAB, 64, 128, 2, 4, attention="sdpa")
    before = {name: x.detach().clone() for name, x in model.named_parameters()}
    trainer = Trainer(
        model=model, args=TrainingArguments(**arguments), train_dataset=rows()[:1], eval_dataset=rows()[1:]
    )
    trainer.train()
    evaluated = trainer.evaluate()["eval_loss"]
    loss = next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
    after = dict(model.named_parameters())
    gradients = {name: (before[name] - _whole(after[name])) / RATE for name in before}
    if trainer.args.process_index == 0:
        torch.save({"loss": loss, "evaluation loss": evaluated, "gradients": gradients}, path)


def _whole(x: torch.Tensor) -> torch.Tensor:
    x = x.detach()
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def trained(way: str, size: int, seconds: float = 300.0) -> dict[str, Any] | str:
    """Return what a way of training found, or its last error."""
    with tempfile.TemporaryDirectory(prefix="conformance-") as name:
        path = Path(name, "found.pt")
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(size)]
        command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
        command += [str(Path(__file__).parents[1] / "conformance.py"), "--as-trainer", way, str(path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
        if done.returncode == 0 and path.exists():
            return dict(torch.load(path))
        lines = [line for line in done.stderr.splitlines() if "Error: " in line and "ChildFailed" not in line]
        return " ".join((lines or ["no error was printed"])[0].split(": ", 1)[-1].split())[:200]


def verdicts(result: dict[str, Any] | str, expected: dict[str, Any]) -> dict[str, Verdict]:
    """Return a verdict on each figure."""
    if isinstance(result, str):
        return dict.fromkeys(BOUNDS, Verdict("does not run", result))
    by_figure: dict[str, Verdict] = {}
    for name in ("evaluation loss", "loss"):
        ratio = float(result[name]) / float(expected[name])
        by_figure[name] = _by(ratio, abs(ratio - 1), BOUNDS[name])
    mine, right = (
        torch.cat([x.flatten().double() for x in of["gradients"].values()]) for of in (result, expected)
    )
    ratio = float(mine @ right / right.square().sum())
    rest = float((mine - right).norm() / right.norm())
    by_figure["gradients"] = _by(ratio, rest, BOUNDS["gradients"])
    return by_figure


def _by(ratio: float, error: float, bound: float) -> Verdict:
    return Verdict("exact") if error <= bound else Verdict("wrong", f"{ratio:.3g} times, off by {error:.1g}")
