"""Text and a model for the examples: Python's standard library as bytes, and a small Llama, random weights.

Owns what the scripts have in common and what a real one would load from elsewhere.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

END = 256
VOCABULARY = 257


def files(number: int) -> list[str]:
    """Return the first files of the standard library, as text."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return [path.read_text(encoding="utf-8") for path in paths[:number]]


def samples(number: int, tokens: int) -> Any:
    """Return samples of `tokens` bytes; the first bytes of each are not predicted, more of them in each."""
    stream = torch.tensor(list("".join(files(20)).encode())[: number * tokens]).view(number, tokens)
    labels = stream.clone()
    for row in range(number):
        labels[row, : 5 * (row % 4)] = -100
    return [{"input_ids": ids, "labels": label} for ids, label in zip(stream, labels, strict=True)]


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes, built here."""
    alphabet = {char: index for index, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    built = Tokenizer(models.BPE(vocab=alphabet | {"<end>": END}, merges=[]))
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=built, eos_token="<end>", pad_token="<end>")


def model(**changes: Any) -> Any:
    """Return the same small Llama on every rank."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        **changes,
    )
    return AutoModelForCausalLM.from_config(config)
