"""Enumerate the configurations of a model type: each switch of its configuration class, one at a time.

Owns which fields of a configuration are switches and which values they take. A switch concerns attention,
positions, shared weights or states, or embeddings. Booleans are found by the class; numbers, names and lists
have a table of values. Every type also runs with both kinds of gradient checkpointing and with inputs_embeds.
What is made of a configuration, and how it is compared, is small_model.py's and model_check.py's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from ds_ring.compat.transformers import PreTrainedConfig
from ds_ring.errors import RingConfigError
from ds_ring_launcher.check.small_model import Checkpointing, shrink

WINDOW = 12  # tokens: below every sequence that is checked
_UNUSED_LENGTH = 4096  # of a rotary scaling's training; shrink() sets its own
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
# Booleans that change no number of a text decoder's training step, or need inputs that a batch has not.
_NO_SWITCHES = {
    "add_cross_attention", "apply_spec_augment", "causal", "is_decoder", "is_encoder", "is_encoder_decoder",
    "return_dict", "return_last_states", "summary_proj_to_labels", "summary_use_proj", "use_mamba_kernels",
    "use_mems_eval", "use_weighted_layer_sum", "classifier_bias", "rescale_prenorm_residual",
    "use_mem_eff_path", "disable_ngram_loss", "moe_shared_expert_overlap", "norm_topk_prob",
    "share_encoder_decoder_embeddings", "concat_input", "mlp_bias", "gelu_activation",
    "enable_moe_block",
}  # fmt: skip
_FACTORS = (
    "attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling", "logit_scale",
    "query_pre_attn_scalar", "scale_emb", "scale_depth", "embedding_scale", "key_multiplier", "softmax_scale",
    "attention_in_multiplier", "attention_out_multiplier", "lm_head_multiplier", "attn_scale",
    "attention_value_scale", "logits_mup_width_multiplier", "log_scaling_alpha",
)  # fmt: skip
_CAPS = ("attn_logit_softcapping", "final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
_KEY_VALUE_HEADS = ("num_key_value_heads", "num_kv_heads", "kv_n_heads", "swa_num_key_value_heads")
_WINDOWS = ("sliding_window", "attention_chunk_size", "sliding_window_size")

# By model type: switches that only matter together.
_EXPERTS = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}
_TOGETHER: dict[str, tuple[dict[str, Any], ...]] = {
    "gemma4_text": (_EXPERTS,),
    "falcon": (
        {"alibi": True, "parallel_attn": False, "multi_query": False},
        {"new_decoder_architecture": True, "num_kv_heads": 1},
        {"new_decoder_architecture": True, "alibi": True},
        {"alibi": True, "attn_implementation": "eager"},  # adds ALiBi twice
        {"alibi": True, "new_decoder_architecture": True, "num_kv_heads": 1, "attn_implementation": "eager"},
    ),
}

Values = Mapping[str, Any]


class Configuration(NamedTuple):
    """Name a configuration of a model type, and a way of running it."""

    name: str  # "default", or what differs from it: "alibi=True"
    changes: Mapping[str, Any] = {}  # values of the configuration class
    checkpointing: Checkpointing = "none"
    inputs_embeds: bool = False


WAYS = (
    Configuration("default"),
    Configuration("checkpointing=reentrant", checkpointing="reentrant"),
    Configuration("checkpointing=non_reentrant", checkpointing="non_reentrant"),
    Configuration("inputs_embeds", inputs_embeds=True),
)


def list_configurations(config: PreTrainedConfig, tokens: int, layers: int = 2) -> list[Configuration]:
    """Return the configurations of a model type, the default first.

    A change that leaves the small model's configuration as it is, or as another change does, is left out.

    Args:
        config: the defaults of the type.
        tokens: of a sample.
        layers: of the small model, at least.
    """
    seen: list[Any] = []
    configurations = list(WAYS)
    for configuration in (Configuration("default"), *_switches(config)):
        try:
            values = shrink(config, tokens, layers, configuration.changes).to_dict()
            values["attn_implementation"] = configuration.changes.get("attn_implementation")
        except RingConfigError:  # the row says why
            values = configuration.changes
        if values not in seen:
            seen.append(values)
            if configuration.changes:
                configurations.append(configuration)
    shared = [
        configuration for configuration in configurations if "num_kv_shared_layers" in configuration.changes
    ]
    for configuration in shared:  # layers hand tensors to later ones, which are computed again
        for way in WAYS[1:3]:
            configurations.append(
                configuration._replace(
                    name=f"{configuration.name}, {way.name}", checkpointing=way.checkpointing
                )
            )
    return configurations


def _switches(config: PreTrainedConfig) -> Iterator[Configuration]:
    try:
        part = config.get_text_config(decoder=True if config.model_type.startswith("musicgen") else None)
    except ValueError:  # a model of several: shrink() refuses it
        return
    values = part.to_dict()
    for name, value in sorted(values.items()):
        yield from (_one(name, setting) for setting in _others(name, value, values))
        if name.endswith("attn_config") and isinstance(value, dict):  # MPT's and DBRX's
            heads = {key: values[key] for key in _HEADS if key in values}
            for key, inner in sorted(value.items()):
                for setting in _others(key, inner, heads | value):
                    change = {name: value | {key: setting}}
                    yield Configuration(f"{name}.{key}={setting}", change)
    for changes in _TOGETHER.get(part.model_type, ()):
        yield Configuration(", ".join(f"{name}={value}" for name, value in changes.items()), changes)
    yield from _windows_on(values)
    yield from _layer_types(values)
    yield from _rotary(values)


def _one(name: str, value: Any) -> Configuration:
    text = f"all {value[0]}" if isinstance(value, list) and len({*map(str, value)}) == 1 else f"{value}"
    return Configuration(f"{name}={text}", {name: value})


def _others(name: str, value: Any, values: Values) -> list[Any]:
    """Return the values that a field takes in turn."""
    if isinstance(value, bool):
        ignored = name in _NO_SWITCHES or name.startswith(("output_", "moe_", "mtp_"))
        return [] if ignored or name == "use_sliding_window" else [not value]
    if name in _KEY_VALUE_HEADS:
        heads = next((values[key] for key in _HEADS if isinstance(values.get(key), int)), None)
        return [1, heads // 2, heads] if heads and not isinstance(value, list) else []
    if name in _CAPS:
        return [2.0 if value is None else None]
    if name in _WINDOWS:
        # A layer of this kind asks for a number; there _layer_types takes it away.
        return [] if value is None or "sliding_attention" in (values.get("layer_types") or ()) else [None]
    if name in _FACTORS:
        if isinstance(value, str):
            return []
        return [0.5 if value is None else value + value // 2 if isinstance(value, int) else 1.5 * value]
    values_of = _VALUES.get(name)
    return (
        [setting for setting in values_of(value, values) if setting != value] if values_of is not None else []
    )


_VALUES: dict[str, Callable[[Any, Values], list[Any]]] = {
    "attention_type": lambda value, _: ["original_full"],  # BigBird's
    "attn_type": lambda value, _: ["uni", "bi"] if value in ("uni", "bi") else [],  # XLNet's
    "attention_layers": lambda value, _: [[kind] * len(value) for kind in ("global", "local")],  # GPT-Neo's
    "clamp_len": lambda value, _: [8],
    "clip_qkv": lambda value, _: [0.5 if value is None else None],
    "embedding_size": lambda value, _: [32],
    "head_dim": lambda value, _: [8] if isinstance(value, int) else [],
    "hidden_size_per_layer_input": lambda value, _: [0],
    "input_embedding_size": lambda value, _: [32],
    "window_size": lambda value, _: [8] if isinstance(value, int) else [],
    "local_attention": lambda value, _: [8],
    "attention_window_size": lambda value, _: [8],
    "index_topk": lambda value, _: [_UNUSED_LENGTH] if isinstance(value, int) else [],  # every token
    "no_rope_layers": lambda value, _: [[0] * len(value), [1] * len(value)] if value else [],
    "num_kv_shared_layers": lambda value, values: [0 if value else values["num_hidden_layers"] // 2],
    "per_layer_config": lambda value, _: [None] if value else [],
    "position_embedding_type": lambda value, _: ["rope", "nope"],
    "q_lora_rank": lambda value, _: [24 if value is None else None],
    "recurrent_kv_cache_mode": lambda value, _: ["last_loop"],
    "rotary_dim": lambda value, _: [4],
    "use_bidirectional_attention": lambda value, values: [
        "all" if values["model_type"].startswith("gemma4") else True
    ],
    "word_embed_proj_dim": lambda value, _: [32],
}


def _windows_on(values: Values) -> Iterator[Configuration]:
    """Return the window of types that have one, but not by default."""
    if values.get("use_sliding_window") is False:
        on = {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": None}
        for first in (0, 1):  # layers without a window
            yield Configuration(
                f"use_sliding_window=True, max_window_layers={first}", on | {"max_window_layers": first}
            )
    elif "sliding_window" in values and values["sliding_window"] is None:
        yield _one("sliding_window", WINDOW)


def _layer_types(values: Values) -> Iterator[Configuration]:
    """Return all layers of one kind, for kinds that the type has, and windows for types that name none."""
    kinds = values.get("layer_types")
    if not isinstance(kinds, list) or not kinds:
        return
    window = any(isinstance(values.get(name), int) for name in _WINDOWS)
    offered = sorted(set(kinds) | ({"sliding_attention"} if window and "full_attention" in kinds else set()))
    for kind in offered:
        changes: dict[str, Any] = {"layer_types": [kind] * len(kinds)}
        if "attention" not in kind.replace("linear_attention", ""):  # caches of none know no length
            changes["use_cache"] = False
        yield Configuration(f"layer_types=all {kind}", changes)


def _rotary(values: Values) -> Iterator[Configuration]:
    """Return each way of scaling rotary embeddings, and another rotated part of a head."""
    rope = values.get("rope_parameters")
    if not isinstance(rope, dict):
        return
    inner = next((key for key in ("full_attention", "main") if isinstance(rope.get(key), dict)), None)
    rotary: dict[str, Any] = rope[inner] if inner is not None else rope
    if any(isinstance(value, dict) for value in rotary.values()):
        return
    common = {
        key: rotary[key] for key in ("rope_theta", "partial_rotary_factor", "mrope_section") if key in rotary
    }
    trained = {"original_max_position_embeddings": _UNUSED_LENGTH}
    longer = [1.0 + 0.25 * place for place in range(64)]
    scalings: dict[str, dict[str, Any]] = {
        "default": {},
        "linear": {"factor": 4.0},
        "dynamic": {"factor": 4.0},
        "yarn": {"factor": 4.0} | trained,
        "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0} | trained,
        "longrope": {"factor": 4.0, "short_factor": [1.0] * 64, "long_factor": longer} | trained,
    }
    for kind, scaling in scalings.items():
        if kind != rotary.get("rope_type", "default"):
            change = common | {"rope_type": kind} | scaling
            yield Configuration(
                f"rope_type={kind}", {"rope_parameters": change if inner is None else rope | {inner: change}}
            )
    share = rotary.get("partial_rotary_factor")
    if share is not None:
        change = rotary | {"partial_rotary_factor": 0.5 if share == 1.0 else 1.0}
        yield Configuration(
            f"partial_rotary_factor={change['partial_rotary_factor']}",
            {"rope_parameters": change if inner is None else rope | {inner: change}},
        )
