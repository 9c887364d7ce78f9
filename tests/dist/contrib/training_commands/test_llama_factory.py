"""LLaMA-Factory's own command on a ring, by its plug-in, against the same command of one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

import ds_ring
from ds_ring.contrib.training_commands import llama_factory
from tests.dist.trainer_logs import EXAMPLES, Logs, check_logs, configs

SECONDS = 300
ROWS, HELD_OUT = 12, 4


def prepare(folder: Path, **changes: Any) -> None:
    """Write a model, its tokenizer of bytes, chats of different lengths, and the JSON without and with a ring."""
    sys.path.insert(0, str(EXAMPLES))
    import text

    letters = {char: index for index, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
    )  # fmt: skip
    fast.save_pretrained(folder / "model")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(fast), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, tie_word_embeddings=False,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    chats = [
        [
            {"role": "user", "content": item[200 : 230 + 5 * n]},
            {"role": "assistant", "content": f"{item[300 : 400 + 20 * n]}\nAction: run"},
        ]
        for n, item in enumerate(text.files(ROWS + HELD_OUT))
    ]
    for name, part in (("train", chats[:ROWS]), ("held_out", chats[ROWS:])):
        lines = [json.dumps({"messages": chat}) for chat in part]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    configs(folder, **{"ring": 2} | changes)


def run(folder: Path, command: list[str], ranks: int, **environment: str) -> str:
    """Return what a command printed; it may start `ranks` processes."""
    root = Path(__file__).resolve().parents[4]
    done = subprocess.run(
        [str(Path(sys.executable).with_name(command[0])), *command[1:]], cwd=folder, timeout=SECONDS,
        env=os.environ | {
            "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(root), "HF_HUB_OFFLINE": "1",
            "DS_SKIP_CUDA_CHECK": "1", "PET_STANDALONE": "1", "NPROC_PER_NODE": str(ranks), **environment,
        },
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    said = [line for line in done.stdout.splitlines() if not line.startswith("[INFO")]
    assert done.returncode == 0, "\n".join(said)[-20000:]
    return done.stdout


def plug_in(name: str) -> str:
    """Return its path, as a user gets it."""
    command = [sys.executable, "-m", "ds_ring.contrib.training_commands", name]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


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
