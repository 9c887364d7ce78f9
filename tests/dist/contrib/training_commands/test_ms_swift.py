"""ms-swift's own command on a ring, by its plug-in, against the same command of one process."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

import ds_ring
from ds_ring.contrib.training_commands import ms_swift
from tests.dist.contrib.training_commands.commands import plug_in, prepare, run
from tests.dist.trainer_logs import Logs, check_logs

FULL = ("--tuner_type", "full")
EVALUATED = ("--val_dataset", "held_out.jsonl", "--eval_strategy", "steps", "--eval_steps", "2")


class Case(NamedTuple):
    """Define a run: arguments of both commands, and what the ring's are."""

    both: tuple[str, ...]
    ring: tuple[str, ...] = ()
    ranks: int = 2
    plain: tuple[str, ...] = ()
    json: dict[str, Any] | None = None
    command: str = "sft"


def batches(size: int, accumulated: int = 1) -> tuple[str, ...]:
    return ("--per_device_train_batch_size", str(size), "--gradient_accumulation_steps", str(accumulated))


CASES = {
    "sft": Case((*FULL, *EVALUATED, *batches(2, 2))),
    "pt": Case((*FULL, *batches(2, 2)), command="pt", json={"zero_optimization": {"stage": 3}}),
    "lora": Case(("--tuner_type", "lora", "--lora_dropout", "0", *EVALUATED, *batches(2, 2))),
    # Replicas have different numbers of labels; the samples of a step are those of one process.
    "replicas": Case((*FULL,), batches(2), 4, batches(4)),
    "stream": Case((*FULL, "--streaming", "true", *batches(2))),
    "replicas of a stream": Case((*FULL, "--streaming", "true"), batches(2), 4, batches(4)),
    # All samples in one step: packed, or padded by one process.
    "packing": Case(
        FULL, ("--packing", "true", "--packing_length", "1024", *batches(4)), plain=batches(12),
        json={"ring_attention": {"pattern": {"causal": True, "documents": True}}},
    ),
    # It weighs "Action:" by 2; ms-swift computes such a loss from logits.
    "loss scale": Case((*FULL, "--loss_scale", "react", *batches(2))),
}  # fmt: skip


def losses(folder: Path, name: str, command: str, ranks: int, *arguments: str) -> Logs:
    """Run the command and return its log, with what it says of the whole run at the end."""
    run(folder, [
        "swift", command, "--model", "model", "--model_type", "qwen3", "--template", "qwen3", "--dataset", "train.jsonl",
        "--torch_dtype", "float32", "--bf16", "false", "--fp16", "false", "--max_length", "512", "--max_steps", "4",
        "--logging_steps", "1", "--learning_rate", "1e-2", "--save_steps", "2", "--report_to", "none",
        "--check_model", "false", "--add_version", "false", "--dataloader_num_workers", "0", "--attn_impl", "sdpa",
        "--split_dataset_ratio", "0", "--output_dir", name, *arguments,
    ], ranks)  # fmt: skip
    last = (folder / name / "logging.jsonl").read_text().splitlines()[-1]
    logs: Logs = json.loads(last)["log_history"]
    return logs


@pytest.mark.night
@pytest.mark.needs("ms-swift")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", CASES)
def test_ms_swift_trains_a_ring_as_one_process(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    prepare(tmp_path, **(case.json or {}))
    plain = ("--deepspeed", "plain.json", *case.plain, *case.both)
    expected = losses(tmp_path, "plain", case.command, 1, *plain)
    ring = ("--deepspeed", "ring.json", "--external_plugins", plug_in("ms_swift"), *case.ring, *case.both)
    got = losses(tmp_path, "ring", case.command, case.ranks, *ring)
    if case.plain:  # other rows, with other padding
        del expected[-1]["total_flos"], got[-1]["total_flos"]
    if name == "packing":
        del expected[-1]["train_samples_per_second"], got[-1]["train_samples_per_second"]  # of packs
    print(f"{name}: {len(expected)} entries, {check_logs(got, expected):.1e}")
    assert expected[-1]["train_loss"] < expected[0]["loss"]


@pytest.mark.night
@pytest.mark.needs("ms-swift")
@pytest.mark.timeout(900)
def test_ms_swift_resumes_a_ring(tmp_path: Path) -> None:
    prepare(tmp_path)
    ring = ("--deepspeed", "ring.json", "--external_plugins", plug_in("ms_swift"), *FULL, *batches(2))
    expected = losses(tmp_path, "ring", "sft", 2, *ring)
    resumed = losses(tmp_path, "resumed", "sft", 2, *ring, "--resume_from_checkpoint", "ring/checkpoint-2")
    check_logs(resumed[:-1], expected[:-1])


@pytest.mark.needs("ms-swift")
def test_every_target_in_ms_swift_exists() -> None:
    ms_swift.SWIFT.check()


def test_the_path_of_a_plug_in_is_printed() -> None:
    assert Path(plug_in("ms_swift")) == Path(str(ms_swift.__file__))
    with pytest.raises(subprocess.CalledProcessError) as error:
        plug_in("swift")
    assert "expected one of ['llama_factory', 'ms_swift'], got ['swift']" in error.value.stderr


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rlhf_type": "grpo"}, "ms-swift: expected swift sft or swift pt of a causal_lm, got grpo"),
        ({"task_type": "embedding"}, "of a causal_lm, got embedding"),
        ({"sequence_parallel_size": 2}, "--sequence_parallel_size: expected 1, got 2"),
        ({"use_logits_to_keep": True}, "--use_logits_to_keep: expected false, got True"),
    ],
)
def test_what_ms_swift_cannot_do_on_a_ring_is_refused(changes: dict[str, Any], words: str) -> None:
    built = {"task_type": "causal_lm", "sequence_parallel_size": 1, "use_logits_to_keep": None}
    assert ms_swift._checked(lambda args: args, args := SimpleNamespace(**built)) is args
    with pytest.raises(ds_ring.RingConfigError) as error:
        ms_swift._checked(lambda args: args, SimpleNamespace(**built | changes))
    assert words in str(error.value)
