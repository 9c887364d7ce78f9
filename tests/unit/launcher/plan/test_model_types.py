"""Every causal model type of transformers: planned with the parameters of its model, or refused by name."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ds_ring import Causal, Full, SlidingWindow
from ds_ring.errors import RingConfigError
from ds_ring.models.layer_masks import read_layer_patterns
from ds_ring_launcher.check.small_model import read_config, shrink
from ds_ring_launcher.plan import known_models, transformers_model
from ds_ring_launcher.plan.model_file import (
    ModelShape,
    _from_transformers,
    _read_shape,
    patterns_by,
    read_complete_config,
)
from ds_ring_launcher.plan.transformers_model import FORMULA, is_complete

# One of each kind: two matrices, biases, latents, experts in some layers, other layers, windows, images.
DAY = (
    "gpt_neox", "phi", "starcoder2", "opt", "gpt2", "nemotron", "deepseek_v3", "llama4_text", "qwen2_moe",
    "qwen3_5_text", "lfm2", "gemma3", "modernbert-decoder", "llama", "gemma2", "qwen3_moe", "gpt_oss",
)  # fmt: skip
# Their attention looks both ways, has other heads than the file says, or runs its layers more than once.
REFUSED = (
    "bert", "roberta", "electra", "big_bird", "roformer", "falcon", "mimo_v2_flash", "gemma4_text", "mllama",
    "hrm_text", "jetmoe", "gpt_neo", "mpt",
)  # fmt: skip


def get_config(model_type: str) -> Any:
    """Return the default configuration of a type; a small one where its defaults make no model."""
    try:
        config = CONFIG_MAPPING[model_type]()
        make_model(config)
    except Exception:  # of any kind: defaults leave sizes open
        return shrink(read_config(model_type), 61)
    return config


def make_model(config: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def write(config: Any, **changes: object) -> str:
    values = config.to_dict() | {"model_type": config.model_type} | changes
    finite = {key: value for key, value in values.items() if key != "time_step_limit"}
    return json.dumps(finite, default=str)


def is_planned(model_type: str) -> bool:
    """Return whether a type is planned, with the parameters and the attention of its model."""
    config = get_config(model_type)
    text = write(config)
    try:
        shape, patterns = _from_transformers(text), patterns_by(read_complete_config(text))
    except RingConfigError:
        return False
    model = make_model(config)
    parameters = sum(x.numel() for x in model.parameters())
    # A formula has no biases, which weigh more in a small model.
    assert shape.parameters == pytest.approx(parameters, rel=0.01), model_type
    assert patterns == read_layer_patterns(model, True), model_type
    # What a token multiplies with is never more than there is, nor are the parts.
    assert shape.active_mlp_parameters <= shape.mlp_parameters
    assert shape.layers * shape.layer_parameters < 1.01 * parameters
    return True


@pytest.mark.parametrize("model_type", DAY)
def test_a_model_type_has_the_parameters_of_its_model(model_type: str) -> None:
    """(gpt_neox had 32 % too many, starcoder2 37 %, llama4 6 % too few.)"""
    assert is_planned(model_type)


@pytest.mark.parametrize("model_type", REFUSED)
def test_a_model_that_its_file_does_not_describe_is_refused_by_name(model_type: str) -> None:
    """(bert was planned with 25 % too many parameters, and half the pairs.)"""
    with pytest.raises(
        RingConfigError, match=f'"{model_type}".*give --layers|"{model_type}", with "attention_t'
    ):
        _from_transformers(write(CONFIG_MAPPING[model_type]()))


@pytest.mark.night
def test_every_model_type_is_planned_as_it_is_or_refused() -> None:
    planned = {model_type for model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if _try(model_type)}
    assert {*FORMULA, *DAY} <= planned and not planned & {*REFUSED}
    assert len(planned) >= 100


def _try(model_type: str) -> bool:
    try:
        read_config(model_type)
        get_config(model_type)
    except Exception:  # of any kind: there is no model to compare with
        return False
    return is_planned(model_type)


@pytest.mark.day("gemma2", "gpt_oss", "llama", "mistral", "qwen3", "qwen3_moe")
@pytest.mark.parametrize("model_type", sorted(FORMULA))
def test_types_of_the_formula_need_no_model(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers_model, "_make_model", None)
    config = CONFIG_MAPPING[model_type]()
    assert _from_transformers(write(config)).counted is None
    # and with the library's defaults in place of the keys, nothing differs
    text = json.loads(write(config))
    left_out = ("head_dim", "num_key_value_heads", "tie_word_embeddings", "layer_types", "sliding_window")
    some = {key: value for key, value in text.items() if key not in left_out or value != getattr(config, key)}
    if model_type != "llama":
        assert not is_complete(some)
    assert _read_shape(json.dumps(some))[0] == _read_shape(json.dumps(text))[0]
    complete = read_complete_config(json.dumps(some))
    assert patterns_by(complete) == patterns_by(text)


@pytest.mark.parametrize(
    ("model_type", "key"),
    [("gemma2", "tie_word_embeddings"), ("gemma", "head_dim"), ("mistral", "num_key_value_heads"),
     ("qwen3", "head_dim"), ("cohere", "tie_word_embeddings"), ("gpt_oss", "num_key_value_heads")],
)  # fmt: skip
def test_a_key_that_is_left_out_has_the_default_of_the_type(model_type: str, key: str) -> None:
    """(gemma-2-9b without `tie_word_embeddings`: 10.16 billion parameters, really 9.24.)"""
    config = CONFIG_MAPPING[model_type]()
    values = json.loads(write(config))
    del values[key]
    parameters = sum(x.numel() for x in make_model(config).parameters())
    shape = _from_transformers(json.dumps(values))
    assert shape.parameters == pytest.approx(parameters, rel=0.01)
    assert shape.kv_heads == config.num_key_value_heads and shape.tied == config.tie_word_embeddings


def test_a_window_that_is_left_out_is_that_of_the_type() -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 128}
    sizes |= {"intermediate_size": 96, "num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": False}
    mistral = json.dumps(sizes | {"model_type": "mistral"})
    assert patterns_by(read_complete_config(mistral)) == (SlidingWindow(4096),) * 2
    assert patterns_by(read_complete_config(json.dumps(sizes))) == (Causal(),) * 2
    both_ways = sizes | {"model_type": "gemma3_text", "use_bidirectional_attention": True}
    assert not any(pattern.is_causal for pattern in patterns_by(read_complete_config(json.dumps(both_ways))))
    assert patterns_by(sizes | {"is_causal": False}) == (Full(),) * 2


def test_latents_have_as_many_keys_as_queries() -> None:
    """(DeepSeek's default of `num_key_value_heads` is 128, for any number of heads.)"""
    shape = _from_transformers('{"model_type": "deepseek_v3", "num_attention_heads": 64}')
    assert (shape.heads, shape.kv_heads) == (64, 64)


def test_a_misspelt_size_is_no_default() -> None:
    values = {"model_type": "qwen2", "hidden_siz": 64, "num_hidden_layers": 2}
    with pytest.raises(RingConfigError, match=r"hidden_size: expected .*did you mean 'hidden_siz'"):
        _from_transformers(json.dumps(values))
    with pytest.raises(RingConfigError, match="did you mean 'llama'"):
        _from_transformers('{"model_type": "lama"}')
    with pytest.raises(RingConfigError, match=r"transformers cannot make it: .*give --layers"):
        _from_transformers('{"model_type": "qwen2", "hidden_size": "wide"}')


def test_known_models_and_complete_files_need_no_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    transformers_model._make_config.cache_clear()
    for name in known_models():
        if "_" not in name:
            assert isinstance(_from_transformers(name), ModelShape)
    for model_type, words in (
        ("gpt_neox", "got no transformers; pip install transformers, or give --layers"),
        ("gemma2", 'got no transformers; pip install transformers, or write all sizes, "layer_types"'),
    ):
        with pytest.raises(RingConfigError, match=words):
            _from_transformers(json.dumps({"model_type": model_type, "hidden_size": 64}))


def test_experts_and_matrices_are_those_of_the_model() -> None:
    # DeepSeek-V3: 37 billion of 671 are active, three of 61 layers are dense
    shape = _from_transformers(write(CONFIG_MAPPING["deepseek_v3"]()))
    active = shape.layers * shape.active_mlp_parameters + shape.mixing_parameters + shape.head_parameters
    assert active / 1e9 == pytest.approx(37, rel=0.02)
    assert shape.active_intermediate == pytest.approx(18432, rel=0.01)
    for model_type, width in {"gpt_neox": 24576, "lfm2": 8192, "llama4_text": 16384}.items():
        shape = _from_transformers(write(CONFIG_MAPPING[model_type]()))
        assert shape.active_intermediate == pytest.approx(width, rel=0.01)


# GELU in one kernel, in Python's operations, ReLU, its square, and gated ones.
@pytest.mark.parametrize("model_type", ["gpt_neox", "phi", "opt", "nemotron", "exaone", "gemma3_text"])
def test_an_mlp_saves_as_many_tensors_as_autograd_does(model_type: str) -> None:
    config = shrink(read_config(model_type), 61)
    shape = _from_transformers(write(config))
    width, saved = shape.active_intermediate, []
    model = AutoModelForCausalLM.from_config(config).train()
    (layers,) = [part for part in model.modules() if isinstance(part, torch.nn.ModuleList)][:1]
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        model(input_ids=torch.arange(61)[None])
    wide = {x.untyped_storage()._cdata for x in saved if x.shape[-1:] == (width,) and x.numel() == 61 * width}
    assert len(wide) == len(layers) * shape.mlp_saved
