"""Run the training command of another package on a small model, by one process and by the ranks of a ring."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

from tests.dist.trainer_logs import EXAMPLES, configs

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
