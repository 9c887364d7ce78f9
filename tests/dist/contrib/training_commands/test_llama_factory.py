"""LLaMA-Factory's own command on a ring, by its plug-in, against the same command of one process."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

import ds_ring
from ds_ring.contrib.training_commands import llama_factory
from tests.dist.contrib.training_commands.commands import plug_in, prepare, run
from tests.dist.trainer_logs import Logs, check_logs

COLUMNS = {
    "formatting": "sharegpt", "columns": {"messages": "messages"},
    "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"},
}  # fmt: skip
COMMON: dict[str, Any] = {
    "model_name_or_path": "model", "stage": "sft", "do_train": True, "finetuning_type": "full", "dataset": "train",
    "dataset_dir": ".", "template": "qwen3", "cutoff_len": 511, "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2, "max_steps": 4, "logging_steps": 1, "learning_rate": 1e-2, "save_steps": 2,
    "report_to": "none", "bf16": False, "fp16": False, "flash_attn": "sdpa", "dataloader_num_workers": 0,
    "disable_gradient_checkpointing": True, "gradient_checkpointing": True,
}  # fmt: skip
EVALUATED = {
    "eval_dataset": "held_out",
    "eval_strategy": "steps",
    "eval_steps": 2,
    "per_device_eval_batch_size": 2,
}


class Case(NamedTuple):
    """Define a run: what differs from COMMON in both YAMLs, and in the ring's."""

    both: dict[str, Any]
    ring: dict[str, Any] | None = None
    ranks: int = 2
    json: dict[str, Any] | None = None


CASES = {
    "sft": Case(EVALUATED),
    "lora": Case(EVALUATED | {"finetuning_type": "lora"}, json={"zero_optimization": {"stage": 3}}),
    "pt": Case({"stage": "pt", "packing": True}),
    "replicas": Case(
        {"per_device_train_batch_size": 4}, {"per_device_train_batch_size": 2}, 4
    ),
    # By one process with a mask of two dimensions of tokens, which no ring has.
    "packing": Case(
        {"neat_packing": True, "cutoff_len": 1024, "per_device_train_batch_size": 1},
        json={"ring_attention": {"pattern": {"causal": True, "documents": True}}},
    ),
}  # fmt: skip


def losses(folder: Path, name: str, ranks: int, requested: dict[str, Any], *starts: str) -> Logs:
    """Run the command and return its log, with what it says of the whole run at the end."""
    described = {item: {"file_name": f"{item}.jsonl"} | COLUMNS for item in ("train", "held_out")}
    if requested.get("stage") == "pt":
        described["train"] = {"file_name": "text.jsonl", "columns": {"prompt": "text"}}
    (folder / "dataset_info.json").write_text(json.dumps(described))
    requested = COMMON | requested | {"output_dir": name, "deepspeed": f"{name}.json"}
    (folder / f"{name}.yaml").write_text(json.dumps(requested))  # JSON is YAML
    run(
        folder, [*starts, "train", f"{name}.yaml"], ranks, FORCE_TORCHRUN="1", DISABLE_VERSION_CHECK="1",
        PET_STANDALONE="0",
    )  # fmt: skip
    logs: Logs = json.loads((folder / name / "trainer_state.json").read_text())["log_history"]
    return logs


@pytest.mark.night
@pytest.mark.needs("LLaMA-Factory")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", CASES)
def test_llama_factory_trains_a_ring_as_one_process(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    prepare(tmp_path, **(case.json or {}))
    chats = [json.loads(line)["messages"] for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    texts = [json.dumps({"text": chat[-1]["content"]}) for chat in chats]
    (tmp_path / "text.jsonl").write_text("\n".join(texts) + "\n")
    expected = losses(tmp_path, "plain", 1, case.both, "llamafactory-cli")
    requested = case.both | (case.ring or {})
    got = losses(tmp_path, "ring", case.ranks, requested, "python", plug_in("llama_factory"))
    if case.ring:  # other rows, with other padding
        del expected[-1]["total_flos"], got[-1]["total_flos"]
    print(f"{name}: {len(expected)} entries, {check_logs(got, expected):.1e}")
    assert expected[-1]["train_loss"] < expected[0]["loss"]


@pytest.mark.needs("LLaMA-Factory")
def test_every_target_in_llama_factory_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISABLE_VERSION_CHECK", "1")
    llama_factory.FACTORY.check()


def test_the_path_of_the_file_is_printed() -> None:
    assert Path(plug_in("llama_factory")) == Path(str(llama_factory.__file__))
    with pytest.raises(subprocess.CalledProcessError) as error:
        plug_in("factory")
    assert "expected one of ['llama_factory'], got ['factory']" in error.value.stderr


def test_what_llama_factory_cannot_do_on_a_ring_is_refused() -> None:
    parsed = (SimpleNamespace(stage="sft"), SimpleNamespace(use_unsloth=False, shift_attn=None))
    assert llama_factory._checked(lambda: parsed) is parsed
    for changes, words in (
        ({"stage": "ppo"}, "LLaMA-Factory: expected stage pt or sft, got ppo"),
        ({"use_mca": True}, "LLaMA-Factory: expected no use_mca on a ring, got true"),
    ):
        with pytest.raises(ds_ring.RingConfigError, match=words):
            llama_factory._checked(lambda changes=changes: (*parsed, SimpleNamespace(**changes)))  # type: ignore[misc]
    with pytest.raises(ds_ring.RingConfigError, match="expected torchrun, got use_ray"):
        llama_factory._refuse_ray()
    samples = torch.tensor([[1, 1, 2, 3, 0, 0]])
    assert llama_factory._make_padding_mask(samples, None).tolist() == [[1, 1, 1, 1, 0, 0]]
