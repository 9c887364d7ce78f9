"""Build a small model of a transformers family, a batch for it, and the section that suits it.

Owns reading a configuration (nothing is downloaded) and shrinking it to a few narrow layers, the heads that
a model can have, weights that make every term of the mathematics matter, and which pattern the model's own
attention is. Kept are layer types, the ratio of query to K/V heads, rotary scaling, soft caps, sinks, norms,
mixtures of experts, multipliers. Windows, chunks and the length that rotary scaling was trained on shrink to
below the number of tokens, so that they matter. Dropout, which no two runs share, is taken out. Imports no
deepspeed: who wrote a wrong word need not wait for it.
"""

from __future__ import annotations

import copy
import inspect
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.models.auto import modeling_auto

from ds_ring.compat.transformers import PreTrainedConfig
from ds_ring.config.json_text import read_object
from ds_ring.config.problems import did_you_mean
from ds_ring.data.batch import IGNORE, Batch
from ds_ring.errors import RingConfigError
from ds_ring.models.checks import bypasses_interface, uses_interface, works_as_is
from ds_ring.plugin import SESSION_METHODS, load

from .small_images import ConfigValues, shrink_images
from .small_sounds import hears, shrink_sounds

Checkpointing = Literal["none", "reentrant", "non_reentrant"]  # of gradients

VOCABULARY, HIDDEN, HEAD_COUNT, HEAD_DIM = 89, 64, 4, 16
SAMPLES = 2

# The largest value of each size, by its names in transformers' configurations.
_SIZES: dict[int, tuple[str, ...]] = {
    VOCABULARY: (
        "vocab_size", "vocab_size_per_layer_input", "decoder_vocab_size", "unpadded_vocab_size",
    ),
    HIDDEN: (
        "hidden_size", "d_model", "n_embd", "dim", "embedding_size", "word_embed_proj_dim", "lru_width",
        "attention_hidden_size", "output_embedding_size", "emb_dim",
        "embedding_dim",
    ),
    96: ("intermediate_size", "ffn_dim", "n_inner", "hidden_dim", "d_ff", "dff", "encoder_ffn_dim",
         "decoder_ffn_dim", "intermediate_size_mlp", "dense_intermediate_size", "d_inner",
         "encoder_hash_byte_group_vocab"),
    128: ("ffn_hidden_size", "mamba_expand_dim", "mamba_d_ssm"),
    32: ("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size",
         "kv_lora_rank", "expert_ffn_hidden_size", "relative_attention_max_distance",
         "hidden_size_per_layer_input"),
    24: ("q_lora_rank",),
    HEAD_DIM: ("head_dim", "d_kv", "qk_nope_head_dim", "v_head_dim", "linear_key_head_dim", "mamba_d_head",
               "linear_value_head_dim", "index_head_dim", "mamba_dt_rank", "time_step_rank", "mamba_d_state",
               "chunk_size", "mamba_chunk_size", "attention_head_dim", "d_head", "mamba_head_dim",
               "ssm_state_size", "linear_head_dim", "block_size", "swa_head_dim"),
    8: ("qk_rope_head_dim", "rotary_dim", "relative_attention_num_buckets"),
    HEAD_COUNT: (
        "num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads", "encoder_attention_heads",
        "decoder_attention_heads", "num_local_experts", "num_experts", "n_routed_experts",
        "swa_num_attention_heads", "linear_num_value_heads", "index_n_heads", "mamba_n_heads",
        "mamba_num_heads", "linear_num_heads",
    ),
    2: ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "n_group",
        "n_groups", "mamba_ngroups", "num_expert_group",
        "attn_layer_period","expert_layer_period", "linear_num_key_heads"),
    1: ("topk_group", "first_k_dense_replace", "attn_layer_offset", "expert_layer_offset", "num_dense_layers",
        "n_shared_experts", "num_shared_experts", "mamba_n_groups", "num_nextn_predict_layers"),
}  # fmt: skip
_KEY_VALUE_HEADS = ("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers",
           "num_decoder_layers", "num_encoder_layers")  # fmt: skip
_POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "context_length",
              "max_source_positions", "max_target_positions")  # fmt: skip
# Their shortest is 4 tokens, and two in one model (a window and a chunk) shrink alike.
_WINDOWS = ("sliding_window", "window_size", "local_attention", "attention_window_size",
            "attention_chunk_size", "sliding_window_size", "floor_scale", "index_topk",
            "keep_window_size", "rel_extent", "log_scaling_n_floor")  # fmt: skip
# transformers derives them again from the other keys.
_DERIVED = ("qk_head_dim", "moe_layers", "quantization_config", "dtype", "torch_dtype")
# None in some defaults, with which no model can be made; these are its values where it can.
_LEFT_OPEN = {
    "vocab_size": VOCABULARY,
    "num_key_value_heads": HEAD_COUNT,
    "head_dim": HEAD_DIM,
    "num_experts_per_tok": 2,
}
# By model type: what its defaults leave open, or what must fit a size that was made smaller. Lists of
# _BY_LAYER are repeated for all layers, some of which are kept, unless the number of layers is fixed here.
_BY_LAYER = ("layer_types", "mlp_layer_types")
_OF_TYPES: dict[str, ConfigValues] = {
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}
    },
    "cpmant": {
        "prompt_length": 7,
        "position_bias_num_buckets": 16,
        "position_bias_max_distance": 32,
        "segment_types": 4,
        "dim_head": HEAD_DIM,
        "dim_ff": 96,
        "pad_token_id": 0,
    },
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}},
    "deepseek_v4": {
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        "index_topk": 4,
    },
    "dory": {  # an attention and an mlp are one layer; one runs before the loop, one in it and one after it
        "layer_types": ["sliding_attention", "mlp", "full_attention", "mlp", "sliding_attention", "mlp"],
        "num_hidden_layers": 6,
        "n_input_layers": 2,
        "n_recurrent_layers": 2,
        "n_output_layers": 2,
    },
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"], "n_group": 1, "topk_group": 1},
    "ernie4_5_vl_moe_text": {"moe_intermediate_size": [48, 32]},
    "step3p5": {"sliding_window": 12},
    "dots1": {"n_routed_experts": HEAD_COUNT, "n_shared_experts": 1},
    "dots3_note_text": {"head_dim": HEAD_DIM + 8},
    "glm5_next_text": {  # the last layer takes what the one before it chose
        "layer_types": ["linear_attention", "indexed_attention", "indexed_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "indexer_types": ["full", "full", "shared"],
        "num_hidden_layers": 3,
        "index_kpool": 4,
        "index_topk": 12,  # a multiple of it
    },
    "hy_v4_vl_text": {"rope_parameters": {"mrope_section": [2, 1, 1]}},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "hrm_text": {"num_layers_per_stack": 1, "num_hidden_layers": 8},  # two cycles of three low and a high
    "inkling_text": {"log_scaling_n_floor": 12, "layer_types": ["hybrid_sliding", "hybrid"]},
    "lfm2": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},  # as the trained ones
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "qwen4_exp_text": {
        "indexer_n_heads": HEAD_COUNT,
        "indexer_kv_heads": 1,
        "indexer_head_dim": HEAD_DIM,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
        "ple_layer_ids": [1],
        "ple_embed_dim": HIDDEN,
        "eos_token_id": 3,
        "ngram_vocab_size_base": 101,
        "heads_per_ngram": 2,
        "use_cache": False,  # of its two kinds of states the cache that it makes by itself has one
    },
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    # the last layer's decay is all but 1
    "minimax": {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2},
    "minimax_m3_vl_text": {  # its defaults have no such layer
        "layer_types": ["full_attention", "minimax_m3_sparse"],
        "index_n_heads": 2,
        "index_block_size": 4,
        "index_topk_blocks": 4,
    },
    "t5": {"decoder_start_token_id": 0},
    "musicgen_decoder": {"num_codebooks": SAMPLES},  # the rows of a batch are codebooks
    "musicgen_melody_decoder": {"num_codebooks": SAMPLES},
    "reformer": {"axial_pos_embds": False},
    "xlstm": {"num_blocks": 2, "hidden_size": 2 * HIDDEN, "embedding_dim": 2 * HIDDEN, "use_cache": False},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
        "num_hidden_layers": 3,
        "attention_hidden_size": 2 * HIDDEN,
        "attention_head_dim": 2 * HEAD_DIM,
    },
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
        "hybrid_layer_ids": [1, 2],
        "num_hidden_layers": 3,
        "attention_hidden_size": 2 * HIDDEN,
        "attention_head_dim": 2 * HEAD_DIM,
        "mamba_headdim": 16,
        "kv_channels": HEAD_DIM,
    },
}
# By the start of a text part's model type: the sections of its rotary half where its defaults name none.
_SECTIONS = {
    "qwen2_vl": [16, 24, 24],
    "qwen2_5_vl": [16, 24, 24],
    "qwen2_5_omni": [16, 24, 24],
    "glm": [8, 12, 12],
    "paddleocr_vl": [16, 24, 24],
    "hunyuan_vl": [16, 16, 16, 16],
    "ernie4_5_vl_moe": [16, 16, 32],
}
_DROPOUTS = (
    "dropout",
    "drop_path_rate",
    "pdrop",
    "dropout_prob",
    "dropout_p",
    "dropout_rate",
    "layerdrop",
    "router_jitter_noise",
)


def read_config(source: str) -> PreTrainedConfig:
    """Return the configuration in a config.json, in the folder of one, or of a model type's defaults."""
    path = Path(source)
    if source in CONFIG_MAPPING and not path.exists():
        return _made(source, {})
    if not path.exists() and path.suffix != ".json" and len(path.parts) == 1:
        near = did_you_mean(source, list(CONFIG_MAPPING.keys()))
        raise RingConfigError(
            f"model: expected a config.json, its folder, or a model type of transformers, got {source!r};"
            + (f" did you mean '{near}'?" if near else " save it by model.config.save_pretrained(folder)")
        )
    if path.is_file() and path.suffix == ".py":
        raise RingConfigError.wrong(
            "model", "a config.json or a model type", f"the script {source}", 'set "verify_first_batch"'
        )
    values = read_object(path / "config.json" if path.is_dir() else path)
    model_type = values.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise RingConfigError(
            f"{source}: model_type: expected one of the installed transformers, got {model_type!r}"
        )
    return _made(model_type, values)


def shrink(
    config: PreTrainedConfig,
    tokens: int,
    layers: int = 2,
    changes: Mapping[str, Any] | None = None,
    images: bool = False,
    sounds: bool = False,
) -> Any:
    """Return a small configuration of the same class.

    Args:
        config: of any size; of a model that reads more than text its text part is taken.
        tokens: in a sample; windows and rotary lengths shrink to below it.
        layers: at least so many, and at least one of each kind.
        changes: values of the configuration that are set before it shrinks; windows among them stay.
        images: return the configuration of the whole model, with a small image encoder.
        sounds: the same, with a small tower of sound.
    """
    if images or sounds:
        text = shrink(config, tokens, layers, changes)
        values = config.to_dict()
        if text.model_type == config.model_type and not config.sub_configs:
            return text
        for key in config.sub_configs:
            if key == "vision_config" and values.get(key) is None:  # Gemma 4 is of text alone by default
                values[key] = config.sub_configs[key]().to_dict()
            if key != "text_config" and values.get(key) is not None:
                _few_layers(values[key])
        _take_dropout_out(values)
        shrink_others = shrink_sounds if sounds else shrink_images
        return _made(config.model_type, shrink_others(config, values, text.to_dict()))
    try:
        config = config.get_text_config(decoder=True if config.model_type.startswith("musicgen") else None)
    except ValueError as error:  # a model of several, of sound and text say
        raise RingConfigError(f"{config.model_type}: {error}") from error
    values = _made(config.model_type, config.to_dict() | dict(changes or {})).to_dict()
    values = {key: value for key, value in values.items() if key not in _DERIVED}
    values |= {key: value for key, value in _LEFT_OPEN.items() if values.get(key, value) is None}
    type_values = _left_by(dict(changes or {}), _OF_TYPES.get(config.model_type, {}))
    for name in () if "num_hidden_layers" in type_values else _BY_LAYER:
        if name in type_values:
            count, kinds = values["num_hidden_layers"], type_values.pop(name)
            values[name] = (kinds * count)[:count]
    for part in (values, *(part for key, part in values.items() if key.endswith("_config") and part)):
        _shrink_layers(part, type_values.get("num_hidden_layers", layers) if part is values else layers)
        _shrink_sizes(part)
    _shrink_lengths(values, tokens)
    _keep_tokens_known(values)
    _take_dropout_out(values)
    stay = (*_WINDOWS, "attn_implementation")
    values |= {name: value for name, value in (changes or {}).items() if name in stay}
    for name, value in type_values.items():
        values[name] = values[name] | value if isinstance(values.get(name), dict) else value
    return _made(config.model_type, values)


def _left_by(changes: ConfigValues, type_values: ConfigValues) -> ConfigValues:
    """Return the values that changes say nothing of."""
    remaining = {name: value for name, value in type_values.items() if name not in changes}
    for name, value in type_values.items():
        if isinstance(changes.get(name), dict) and isinstance(value, dict):
            remaining[name] = _left_by(changes[name], value)
    return remaining


def _made(model_type: str, values: ConfigValues) -> PreTrainedConfig:
    if model_type.endswith("_assistant"):  # Gemma 4's
        raise RingConfigError.wrong(
            model_type, "a model that runs by itself", "one that drafts tokens for another", "check that"
        )
    try:
        config: PreTrainedConfig = CONFIG_MAPPING[model_type].from_dict(copy.deepcopy(values))
    except Exception as error:  # transformers validates with errors of its own
        raise RingConfigError(
            f"{model_type}: transformers cannot make this configuration: {type(error).__name__}: {error}"
        ) from error
    return config


def _few_layers(values: ConfigValues) -> None:
    """Keep two layers, or one of each kind, of an encoder and of those inside it."""
    _shrink_layers(values, 2)
    for part in values.values():
        if isinstance(part, dict) and "model_type" in part:
            _few_layers(part)


def _shrink_layers(values: ConfigValues, at_least: int) -> None:
    """Keep fewer layers: one of each kind, by every list that has an entry for each layer."""
    name = next((name for name in _LAYERS if isinstance(values.get(name), int)), None)
    if name is None:
        return
    count = values[name]
    by_layer = [key for key, value in values.items() if isinstance(value, list) and len(value) == count > 1]
    layer_values = {int(layer): value for layer, value in (values.get("per_layer_config") or {}).items()}
    first_shared = count - (values.get("num_kv_shared_layers") or 0)  # the last layers take others' keys
    kinds = [
        repr(([values[key][layer] for key in by_layer], layer_values.get(layer), layer >= first_shared))
        for layer in range(count)
    ]
    firsts = {kinds.index(kind) for kind in kinds}
    others = [layer for layer in range(count) if layer not in firsts]
    layers_left = sorted(firsts.union(others[: max(0, at_least - len(firsts))]))
    if layer_values:
        values["per_layer_config"] = {
            place: layer_values[layer] for place, layer in enumerate(layers_left) if layer in layer_values
        }
    for key in by_layer:
        values[key] = [values[key][layer] for layer in layers_left]
    if first_shared < count:
        values["num_kv_shared_layers"] = sum(layer >= first_shared for layer in layers_left)
    for key in _LAYERS:
        if isinstance(values.get(key), int):
            values[key] = min(values[key], len(layers_left))
    if isinstance(values.get("mlp_only_layers"), list):
        values["mlp_only_layers"] = [layer for layer in values["mlp_only_layers"] if layer < len(layers_left)]
    if "attention_types" in values:  # GPT-Neo's: kinds, and how often
        values["attention_types"] = [[values["attention_layers"], 1]]


def _shrink_sizes(values: ConfigValues) -> None:
    heads = next((values[key] for key in _SIZES[HEAD_COUNT][:5] if isinstance(values.get(key), int)), None)
    if values.get("query_pre_attn_scalar", 0) == values.get("head_dim"):  # Gemma's own name for it
        values["query_pre_attn_scalar"] = HEAD_DIM
    if values.get("head_dim") is not None and values.get("head_dim") == values.get("qk_rope_head_dim"):
        values["head_dim"] = 8
    for largest, names in _SIZES.items():
        for name in names:
            if isinstance(values.get(name), int) and not isinstance(values[name], bool):
                values[name] = min(values[name], largest)
            elif isinstance(values.get(name), list):  # one for each layer
                values[name] = [
                    min(size, largest) if isinstance(size, int) else size for size in values[name]
                ]
    width = (values.get("mamba_expand") or 0) * HIDDEN  # of Mamba 2's heads together
    if width and isinstance(values.get("mamba_d_head"), int):
        values["mamba_d_head"] = width // values["mamba_n_heads"]
    if "expand" in values and isinstance(values.get("num_heads"), int):  # Mamba 2 itself
        values["head_dim"] = values["expand"] * values["hidden_size"] // values["num_heads"]
    for name in _KEY_VALUE_HEADS:
        if isinstance(values.get(name), int) and heads:
            values[name] = HEAD_COUNT if values[name] == heads else min(values[name], 2)
    for layer in (values.get("per_layer_config") or {}).values():
        _shrink_sizes(layer)


def _shrink_lengths(values: ConfigValues, tokens: int) -> None:
    """Shrink windows to a fifth of the tokens, rotary scaling's length to between shard and sequence.

    Known positions are twice as many as tokens: more than a type may have (Blenderbot 128).
    """
    for name in _WINDOWS:
        if isinstance(values.get(name), int) and values[name] > 0:
            values[name] = min(values[name], max(4, tokens // 5))
    for name in _POSITIONS:
        if isinstance(values.get(name), int) and values[name] > 0:
            values[name] = 2 * tokens + 8
    trained = 7 * tokens // 8
    _shrink_sections(values)
    rope = values.get("rope_parameters") or {}
    for part in [rope, *(part for part in rope.values() if isinstance(part, dict))]:
        kind = part.get("rope_type", "default")
        if kind in ("default", "proportional"):
            continue
        if "original_max_position_embeddings" in part:
            part["original_max_position_embeddings"] = trained
        for key in ("short_factor", "long_factor"):
            if key in part:
                share = part.get("partial_rotary_factor") or values.get("partial_rotary_factor") or 1.0
                count = int((values.get("head_dim") or HEAD_DIM) * share) // 2
                part[key] = [part[key][place * len(part[key]) // count] for place in range(count)]
        values["max_position_embeddings"] = trained if kind == "dynamic" else 2 * tokens
    if values.get("original_max_position_embeddings"):
        values["original_max_position_embeddings"] = trained


def _shrink_sections(values: ConfigValues) -> None:
    """Divide the small rotary half among the axes of time, height and width, in the large one's shares."""
    rope, model_type = values.get("rope_parameters") or {}, values.get("model_type") or ""
    sections = rope.get("mrope_section") or next(
        (shares for start, shares in _SECTIONS.items() if model_type.startswith(start)), None
    )
    if not sections:
        return
    share = rope.get("partial_rotary_factor") or values.get("partial_rotary_factor") or 1.0
    half = int(HEAD_DIM * share) // 2
    ends = [sum(sections[: number + 1]) * half // sum(sections) for number in range(len(sections))]
    rope["mrope_section"] = [end - start for start, end in zip([0, *ends], ends, strict=False)]


def _keep_tokens_known(values: ConfigValues) -> None:
    """Move special tokens inside the small vocabulary."""
    size = values.get("vocab_size", VOCABULARY)
    for name, value in values.items():
        if str(name).endswith(("_token_id", "_token_index")):
            if isinstance(value, int):
                values[name] = value if value < size else value % size
            elif isinstance(value, list):
                values[name] = [item % size for item in value if isinstance(item, int)]


def _take_dropout_out(values: ConfigValues) -> None:
    for name, value in values.items():
        if isinstance(value, dict):
            _take_dropout_out(value)
        elif str(name).endswith(_DROPOUTS) and isinstance(value, float):
            values[name] = 0.0


MAX_PARAMETERS = 20_000_000
HIDDEN_CLASSES = 8  # labels of a model without a head: its hidden states are taken for logits
_HAVE_A_LOSS = ("causal-lm", "seq2seq-lm", "image-text", "sequence-classification")


class Head(NamedTuple):
    """Name the class that makes a model with this head, and transformers' table of the families that have
    one.
    """

    maker: str
    families: Any


HEADS = {
    "causal-lm": Head("AutoModelForCausalLM", modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
    "masked-lm": Head("AutoModelForMaskedLM", modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES),
    "seq2seq-lm": Head("AutoModelForSeq2SeqLM", modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES),
    "speech-seq2seq-lm": Head(
        "AutoModelForSpeechSeq2Seq", modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES
    ),
    "sequence-classification": Head(
        "AutoModelForSequenceClassification", modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
    ),
    "token-classification": Head(
        "AutoModelForTokenClassification", modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES
    ),
    "image-text": Head(
        "AutoModelForImageTextToText", modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    ),
    "base": Head("AutoModel", modeling_auto.MODEL_MAPPING_NAMES),
}


def section_for(model: PreTrainedModel, head: str) -> dict[str, Any]:
    """Return the section as its user would write it: windows and chunks are the model's to say."""
    kind = type(model)
    if head == "image-text" or hears(model.config):  # the attention is that of the language part
        return {"pattern": {"causal": True}}
    as_is = not bypasses_interface(model) and not uses_interface(kind) and works_as_is(kind)
    sees_all = getattr(model.config, "attn_type", "") == "bi" or model.config.model_type == "cpmant"
    sees_all = sees_all or _is_encoder(model.config)
    causal = head == "seq2seq-lm" or (head != "masked-lm" and not sees_all)
    return {"pattern": {"causal": causal}} | ({"attention": "as_is"} if as_is else {})


def has_a_loss(model: PreTrainedModel, head: str) -> bool:
    """Return whether the loss is the model's own; else it is taken of its logits, as a user has to."""
    # GIT's loss leaves out as many tokens as an image has.
    if head not in _HAVE_A_LOSS or model.config.model_type == "git":
        return False
    source = inspect.getsource(inspect.unwrap(type(model).forward))
    return head != "causal-lm" or "loss_function(" in source or "super()" in source


def usual_head(config: PreTrainedConfig) -> str:
    """Return the key of HEADS that the family is mostly used with."""
    family = config.model_type
    if config.is_encoder_decoder:
        return "speech-seq2seq-lm" if family in HEADS["speech-seq2seq-lm"].families else "seq2seq-lm"
    if _is_encoder(config):
        return "masked-lm"
    return "causal-lm" if family in HEADS["causal-lm"].families else "base"


def _is_encoder(config: PreTrainedConfig) -> bool:
    return config.model_type in HEADS["masked-lm"].families and not getattr(config, "is_decoder", False)


def build(config: PreTrainedConfig, head: str, seed: int) -> PreTrainedModel:
    """Return the model in float32, the same on every rank, with weights that leave nothing at zero or one.

    Raises:
        RingConfigError: there is no such head, or no such model, or it would be large.
    """
    if head not in HEADS:
        raise RingConfigError(f"head: expected one of {', '.join(HEADS)}, got {head!r}")
    class_name, families = HEADS[head]
    make = getattr(transformers, class_name).from_config
    # Of the text part of Emu 3 and Mllama transformers makes a model, but not by its model type.
    outer = max(
        (family for family in families if config.model_type.startswith(f"{family}_")), key=len, default=None
    )
    if config.model_type not in families and outer is not None:
        make = getattr(transformers, families[outer])._from_config
    elif config.model_type not in families:
        having = [name for name, head_row in HEADS.items() if config.model_type in head_row.families]
        raise RingConfigError.wrong(
            config.model_type, f"the head {head}", "none", f"use {' or '.join(having) or 'another model'}"
        )
    if head == "sequence-classification" and config.pad_token_id is None:
        config.pad_token_id = 0  # transformers asks for one to find the last token of each sample
    try:
        with torch.device("meta"):
            parameters = sum(p.numel() for p in make(config).parameters())
        if parameters > MAX_PARAMETERS:
            raise ValueError(f"it would still have {parameters:,} parameters")
        torch.manual_seed(seed)
        model = make(config, dtype=torch.float32)
    except Exception as error:
        raise RingConfigError(
            f"{config.model_type}: the small model cannot be made: {type(error).__name__}: {error}"
        ) from error
    _randomise(model, seed)
    if config.model_type == "llama4":
        model.language_model.register_forward_hook(_add_image_outputs)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # those that have a default where the configuration is silent
    trained: PreTrainedModel = model.train()
    return trained


def _add_image_outputs(_: nn.Module, __: Any, output: Any) -> None:
    """Add what transformers 5.24.0 reads of Llama 4's text part, which has none: no call ends without it."""
    output.image_outputs = None


def _randomise(model: nn.Module, seed: int) -> None:
    """Make scores of attention and routing of order one (they start nearly flat), and no bias zero."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            generator = torch.Generator().manual_seed(seed + zlib.crc32(name.encode()))
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim >= 2:
                parameter.copy_(noise / max(parameter.shape[-2:]) ** 0.5)
            else:
                parameter.add_(0.1 * noise)
        for name, buffer in model.named_buffers():
            if name.endswith("bias") and buffer.ndim == 1 and buffer.is_floating_point():  # of routers
                generator = torch.Generator().manual_seed(seed + zlib.crc32(name.encode()))
                buffer.add_(0.1 * torch.randn(buffer.shape, generator=generator))


def make_batch(config: PreTrainedConfig, head: str, tokens: int, seed: int, own_loss: bool) -> Batch:
    """Return two samples without special tokens; some labels are left out, on one rank more than another.

    `own_loss`: whether the model computes its loss of labels.
    """
    labels, values = config.num_labels or 2, config.to_dict()
    named = [value for name, value in values.items() if name.endswith(("_token_id", "_token_index"))]
    named += [*(values.get("vocabulary_map") or {}).values()]  # of codes of images
    flat = [item for value in named for item in (value if isinstance(value, list) else [value])]
    special = {item for item in flat if isinstance(item, int)}
    known = min(VOCABULARY, getattr(config.get_text_config(), "vocab_size", None) or VOCABULARY)
    plain = torch.tensor([token for token in range(known) if token not in special])
    generator = torch.Generator().manual_seed(seed + 1)
    shape = (SAMPLES, tokens)
    ids_BT = plain[torch.randint(len(plain), shape, generator=generator)]
    if head == "sequence-classification":
        return {"input_ids": ids_BT, "labels": torch.arange(SAMPLES) % labels}
    classes = {"token-classification": labels, "base": HIDDEN_CLASSES}.get(head)
    labels_BT = ids_BT.clone() if classes is None else torch.randint(classes, shape, generator=generator)
    if head == "seq2seq-lm":  # another text, of another length
        tokens = tokens * 2 // 3 + 1
        labels_BT = labels_BT.flip(1)[:, :tokens].contiguous()
    labels_BT[0, : tokens // 3] = IGNORE
    return {"input_ids": ids_BT, ("labels" if own_loss else "shift_labels"): labels_BT}


# One batch has three forms: plain, padded on the right, packed with documents.
# Shapes: B samples, T tokens, D rows of one process, L tokens in such a row, N tokens that are compared.

Form = Literal["plain", "padded", "packed", "tree"]
FORMS: tuple[Form, ...] = ("plain", "padded", "packed")
if "tree_batch" in SESSION_METHODS:  # a capability
    FORMS += ("tree",)


class Given(NamedTuple):
    """Hold one form of a batch."""

    form: Form
    ring: Batch  # whole, [B, T]
    alone: Batch  # [D, L]
    rows: tuple[Tensor, Tensor] | None  # of the ring's and of one process's tokens that are compared, [N]

    def take_ring(self, x: Tensor) -> Tensor:
        """Return the tokens [1, N, ...] of a result [B, T, ...] that are compared; all of one of samples."""
        return _taken(x, self.rows and self.rows[0], self.ring)

    def take_alone(self, x: Tensor) -> Tensor:
        """Return the same of a result [D, L, ...] of one process."""
        return _taken(x, self.rows and self.rows[1], self.alone)


def _taken(x: Tensor, rows: Tensor | None, batch: Batch) -> Tensor:
    samples, tokens = batch["input_ids" if "input_ids" in batch else "inputs_embeds"].shape[:2]
    if rows is None or x.ndim < 2 or x.shape[1] != tokens or samples % x.shape[0]:
        return x
    # Several rows of a batch may be one of the model: its codebooks (Musicgen).
    count = torch.zeros(samples * tokens, dtype=torch.int64).index_fill(0, rows, 1)
    taken = count.view(x.shape[0], -1, tokens).amin(dim=1).flatten()
    return x.flatten(0, 1)[rows if samples == x.shape[0] else taken.nonzero()[:, 0]][None]


def _filled(key: str, padding: int) -> int:
    """Return what padding has in a tensor of a batch."""
    return padding if key == "input_ids" else 0 if key.endswith("token_type_ids") else IGNORE


def make_form(form: Form, plain: Batch, padding: int, causal: bool) -> Given:
    """Return a form of a plain batch.

    Args:
        form: which.
        plain: input_ids [B, T], and labels or shift_labels [B, T], or labels [B] of samples.
        padding: the id of tokens that are none.
        causal: whether the model is: then no document's last token has a label.
    """
    if form == "plain":
        return Given(form, plain, plain, None)
    ids_BT = plain["input_ids"]
    if form == "tree":
        return _tree(ids_BT, padding)
    documents_BT = _documents(ids_BT.shape[1]) if form == "packed" else _lengths(ids_BT.shape[1])
    real_BT = documents_BT >= 0
    ends_BT = torch.nn.functional.pad(documents_BT.diff(dim=1) != 0, (0, 1), value=True)
    batch: Batch = {"input_ids": ids_BT.masked_fill(~real_BT, padding)}
    # of images, or of a decoder's tokens; labels [B] are of samples
    images = {
        key: x for key, x in plain.items() if x.shape != ids_BT.shape and (x.ndim > 1 or "labels" not in key)
    }
    for key, labels in plain.items():
        if key == "input_ids" or key in images:
            continue
        batch[key] = labels if labels.ndim == 1 else labels.masked_fill(~real_BT, _filled(key, padding))
        if key == "shift_labels" and causal:
            batch[key] = batch[key].masked_fill(ends_BT, IGNORE)
    if form == "padded":
        batch |= images | {"attention_mask": real_BT.long()}
        return Given(form, batch, batch, (real_BT.flatten().nonzero()[:, 0],) * 2)
    ring_rows, alone_rows, alone = _unpacked(batch, documents_BT, padding)
    return Given(
        form, batch | images | {"document_ids": documents_BT}, alone | images, (ring_rows, alone_rows)
    )


def _tree(ids_BT: Tensor, padding: int) -> Given:
    """Return rollouts of two prompts as one row that has common prefixes once, and as rows of their own.

    A token that several rollouts share counts once on both sides.
    """
    (first, second), half = ids_BT.tolist(), ids_BT.shape[1] // 2
    answers = [first[half:], first[half : half + 4] + second[half:], second[half + 2 :]]
    rollouts = [*(first[:half] + answer for answer in answers), second[: half + 3]]
    tree = load(SESSION_METHODS["tree_batch"])(None, rollouts)
    longest = max(map(len, rollouts))
    alone = {
        "input_ids": torch.full((len(rollouts), longest), padding),
        "attention_mask": torch.zeros(len(rollouts), longest, dtype=torch.int64),
        "shift_labels": torch.full((len(rollouts), longest), IGNORE),
    }
    of_place: dict[int, int] = {}  # the token of one rollout for each token of the row
    for number, (ids, places) in enumerate(zip(rollouts, tree.places, strict=True)):
        alone["input_ids"][number, : len(ids)] = torch.tensor(ids)
        alone["attention_mask"][number, : len(ids)] = 1
        for token, place in enumerate(places.tolist()):
            of_place.setdefault(place, number * longest + token)
    places_, tokens = (torch.tensor(indices) for indices in zip(*of_place.items(), strict=True))
    alone["shift_labels"].view(-1)[tokens] = tree.batch["shift_labels"][0, places_]
    return Given("tree", tree.batch, alone, (places_, tokens))


def _lengths(tokens: int) -> Tensor:
    """Return 0 for tokens of two samples, and -1 for padding: a little, and nearly half."""
    ends = torch.tensor([[tokens - 3], [tokens // 2 + 2]])
    return torch.where(torch.arange(tokens) < ends, 0, -1)


def _documents(tokens: int) -> Tensor:
    """Return the documents of two rows, some across the ranks' borders; the second row ends with padding."""
    starts = [[tokens // 3, tokens // 2 + 4], [tokens // 4, tokens - tokens // 8]]
    at = torch.arange(tokens)
    documents_BT = torch.stack([sum((at >= start).long() for start in row) + 0 * at for row in starts])
    documents_BT[1, starts[1][1] :] = -1
    return documents_BT


def _unpacked(batch: Batch, documents_BT: Tensor, padding: int) -> tuple[Tensor, Tensor, Batch]:
    """Return tokens' indices in the packed batch, their indices in one row a document, and these rows."""
    tokens = documents_BT.shape[1]
    spans = [
        (document_ids == number).nonzero()[:, 0] + row * tokens
        for row, document_ids in enumerate(documents_BT)
        for number in range(int(document_ids.max()) + 1)
    ]
    longest = max(map(len, spans))
    ring_rows = torch.cat(spans)
    alone_rows = torch.cat([torch.arange(len(span)) + row * longest for row, span in enumerate(spans)])
    alone: Batch = {"attention_mask": torch.zeros(len(spans) * longest, dtype=torch.int64)}
    alone["attention_mask"][alone_rows] = 1
    for key, values in batch.items():
        alone[key] = torch.full((len(spans) * longest,), _filled(key, padding))
        alone[key][alone_rows] = values.flatten()[ring_rows]
    return ring_rows, alone_rows, {key: x.view(len(spans), longest) for key, x in alone.items()}
