"""What a configuration is shrunk to, and which are refused."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, LlamaConfig
from transformers.models.llama import modeling_llama

from ds_ring.errors import RingConfigError
from ds_ring_launcher.check.model_check import _alone, _differs_from_eager
from ds_ring_launcher.check.rounding import InFloat64
from ds_ring_launcher.check.small_images import add_images, shrink_images
from ds_ring_launcher.check.small_model import (
    _OF_TYPES,
    _shrink_layers,
    build,
    make_batch,
    read_config,
    shrink,
)
from ds_ring_launcher.check.small_sounds import add_sounds


def test_a_small_model_keeps_a_layer_of_each_kind_that_shares_keys() -> None:
    """Layers 4 and 5 take the keys of others, and each kind of layer is there with keys of its own, too."""
    types = ["sliding", "full"]
    values: dict[str, Any] = {"num_hidden_layers": 6, "layer_types": types * 3, "num_kv_shared_layers": 2}
    _shrink_layers(values, 2)
    assert values == {
        "num_hidden_layers": 4, "layer_types": types * 2, "num_kv_shared_layers": 2
    }  # fmt: skip


@pytest.mark.parametrize("layers", range(1, 6))
@pytest.mark.parametrize("model_type", sorted(_OF_TYPES))
def test_lists_by_layer_have_an_entry_for_each(model_type: str, layers: int) -> None:
    """Types whose defaults leave the kinds of their layers open have as many kinds as layers."""
    config = shrink(read_config(model_type), 61, layers)
    of_layer = {
        name: len(getattr(config, name))
        for name in ("layer_types", "mlp_layer_types", "indexer_types", "layers_block_type")
        if isinstance(getattr(config, name, None), list) and model_type != "dory"  # of two a layer
    }
    assert set(of_layer.values()) <= {config.num_hidden_layers}, of_layer
    if "num_hidden_layers" not in _OF_TYPES[model_type] and of_layer:
        assert config.num_hidden_layers >= layers


@pytest.mark.parametrize("tokens", [61, 100, 150])
def test_keys_chosen_are_a_multiple_of_those_pooled(tokens: int) -> None:
    """GLM 5 Next chooses keys in pools of four, however many tokens there are."""
    config = shrink(read_config("glm5_next"), tokens, images=True).text_config
    assert config.index_topk % config.index_kpool == 0


@pytest.mark.parametrize("factor", [1, 2])
def test_a_model_whose_eager_attention_is_another_is_seen(
    monkeypatch: pytest.MonkeyPatch, factor: int
) -> None:
    """(Falcon's divided ALiBi by another factor than its default one.)"""
    attend = modeling_llama.eager_attention_forward

    def other(module: Any, q: Any, *rest: Any, **kwargs: Any) -> Any:
        return attend(module, factor * q, *rest, **kwargs)

    monkeypatch.setattr(modeling_llama, "eager_attention_forward", other)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = modeling_llama.LlamaForCausalLM(LlamaConfig(vocab_size=31, **sizes))
    tokens = torch.arange(12)[None]
    batch: Any = SimpleNamespace(alone={"input_ids": tokens, "labels": tokens}, take_alone=lambda x: x)
    eager = _alone(copy.deepcopy(model), batch, "causal-lm")
    assert bool(_differs_from_eager(model, batch, "causal-lm", eager)) == (factor == 2)


def test_a_small_model_has_positions_for_all_tokens() -> None:
    """Blenderbot knows 128."""
    assert read_config("blenderbot").max_position_embeddings == 128
    assert shrink(read_config("blenderbot"), 150).max_position_embeddings >= 150


@pytest.mark.parametrize(
    ("model_type", "head"),
    [("gemma3n_text", "causal-lm"), ("inkling2", "image-text"), ("inkling2_text", "causal-lm")],
)
def test_sizes_by_layer_and_of_windows_shrink(model_type: str, head: str) -> None:
    """Gemma 3n has a list of MLP widths, Inkling 2 a second vocabulary and other heads in windows."""
    made = small(model_type, head)
    assert sum(parameter.numel() for parameter in made.parameters()) < 1e6


class _TwoTexts(CONFIG_MAPPING["llava"]):  # type: ignore[misc]
    def get_text_config(self, decoder: Any = None, encoder: Any = None) -> Any:
        raise ValueError("Multiple valid text configs were found")


def written(folder: Path, **values: Any) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps(values))
    return str(path)


def small(model_type: str, head: str = "causal-lm", tokens: int = 61) -> Any:
    images, sounds = head == "image-text", head == "seq2seq-lm"
    return build(shrink(read_config(model_type), tokens, images=images, sounds=sounds), head, seed=0)


REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a word that is wrong": (lambda _: read_config("lama"), "did you mean 'llama'"),
    "a script": (lambda _: read_config(__file__), "got the script"),
    "an unknown type": (
        lambda f: read_config(written(f, model_type="lama")), "one of the installed transformers",
    ),
    "values that do not fit": (
        lambda f: read_config(written(f, model_type="llama", num_hidden_layers="many")),
        "transformers cannot make this configuration",
    ),
    "a drafting model": (lambda _: read_config("gemma4_assistant"), "drafts tokens for another"),
    "one configuration for text and images": (
        lambda _: small("llama", "image-text"), "expected the head image-text, got none",
    ),
    "several texts": (lambda _: shrink(_TwoTexts(), 61), "Multiple valid text configs"),
    "a head that is none": (lambda _: small("llama", "tail"), "head: expected one of causal-lm"),
    "a head that the type lacks": (
        lambda _: build(shrink(read_config("t5"), 61), "causal-lm", 0), "use seq2seq-lm",
    ),
    "a large model": (
        lambda _: build(read_config("llama"), "causal-lm", 0), r"it would still have [\d,]+ parameters",
    ),
    "no vision": (lambda _: shrink_images(read_config("llama"), {}, {"hidden_size": 64}), "got no parts"),
    "no features of images": (
        lambda _: add_images({}, _without_features(), 0), "expected get_image_features for images",
    ),
    "images of no size": (lambda _: add_images({}, _without_images(), 0), "no images can be made"),
    "images that do not fit": (lambda _: _few_tokens(), "expected images of 6 tokens"),
    "sounds that do not fit": (
        lambda _: add_sounds({"input_ids": torch.zeros(2, 9)}, small("voxtral", "seq2seq-lm"), 0),
        r"voxtral: expected sounds of \[4, 4, 4\] tokens, got .*9 tokens.*; give more",
    ),
    "sounds of another type": (
        lambda _: shrink(read_config("qwen2_5_omni_thinker"), 61, sounds=True),
        "qwen2_5_omni_thinker: expected one of audioflamingo3, .*; check its text part",
    ),
}  # fmt: skip


def _without_features() -> Any:
    config = SimpleNamespace(model_type="mllama", sub_configs={"vision_config": None})
    return SimpleNamespace(base_model=object(), config=config, forward=lambda pixel_values: None)


def _without_images() -> Any:
    model = small("llava", "image-text")
    model.config.vision_config.image_size = 0
    return model


def _few_tokens() -> Any:
    model = small("llava", "image-text")
    return add_images(make_batch(model.config, "image-text", 6, 0, True), model, 0)


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_made_small_is_refused(case: str, tmp_path: Path) -> None:
    make, words = REFUSED[case]
    with pytest.raises(RingConfigError, match=words):
        make(tmp_path)


def test_a_run_in_float64_is_in_float64_where_a_model_asks_for_float32() -> None:
    wide = torch.ones(2, dtype=torch.float64)
    with InFloat64():
        found = [wide.float(), wide.to(torch.float32), wide.softmax(0, dtype=torch.float32)]
        found.append(torch.zeros(2, dtype=torch.float32))
    assert {x.dtype for x in found} == {torch.float64}
    assert wide.float().dtype == torch.float32


@pytest.mark.day(
    *("aria", "deepseek_vl_hybrid", "fuyu", "gemma4", "idefics2", "inkling2", "instructblip", "kimi_k25"),
    *("lfm2_vl", "llama4", "llava_next", "minicpmv4_6", "qwen2_vl", "qwen2_5_omni_thinker", "step3p7"),
)
@pytest.mark.parametrize(
    "family",
    [
        *("aria", "deepseek_vl_hybrid", "fuyu", "gemma4", "granite4_vision", "idefics2", "inkling2"),
        *("instructblip", "kimi_k25", "lfm2_vl", "llama4", "llava_next", "minicpmv4_6", "molmo2"),
        *("nemotron_h_omni", "paddleocr_vl", "paligemma", "qwen2_vl", "qwen2_5_omni_thinker", "step3p7"),
        "video_llama_3",
    ],
)
def test_images_of_small_models_have_their_features(family: str) -> None:
    """Every form in which a family takes images and videos: the model counts features and tokens itself."""
    config = shrink(read_config(family), 61, images=True)
    model = build(config, "image-text", 0)
    text = make_batch(config, "image-text", 61, 0, True)
    batch = add_images(text, model, 0)
    loss = model(**batch).loss
    loss.backward()
    assert bool(torch.isfinite(loss))
    grads = [p.grad for name, p in model.named_parameters() if "vis" in name and p.grad is not None]
    assert grads and all(bool(torch.isfinite(one).all()) for one in grads)


def test_a_class_that_reads_text_gets_no_images() -> None:
    model = small("llama")
    text = make_batch(model.config, "causal-lm", 61, 0, True)
    assert add_images(text, model, 0) is text


@pytest.mark.parametrize(
    "family", ["glmasr", "granite_speech", "omniasr", "qwen3_asr", "vibevoice_asr", "voxtral"]
)
def test_sounds_of_small_models_have_their_features(family: str) -> None:
    model = small(family, "seq2seq-lm")
    batch = add_sounds(make_batch(model.config, "causal-lm", 61, 0, True), model, 0)
    loss = model(**batch).loss
    loss.backward()
    tower = [p.grad for name, p in model.named_parameters() if "language_model" not in name]
    assert bool(torch.isfinite(loss)) and any(grad is not None and bool(grad.any()) for grad in tower)
