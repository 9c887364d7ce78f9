"""Read the model of `ds-ring plan`: a transformers config.json, read as JSON, or sizes one by one.

What the file leaves out, and what the formula of `ModelShape` does not cover, transformers says.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from ds_ring.config.json_text import Json, parse_object, read_object
from ds_ring.config.messages import sentence, shown
from ds_ring.config.problems import did_you_mean
from ds_ring.config.section import RingConfig, named_patterns, pattern_from_config
from ds_ring.data.layer_patterns import NARROW, LayerPatterns, make_type_patterns
from ds_ring.errors import RingConfigError
from ds_ring.masks.pattern import Pattern
from ds_ring.schedule.layout import Mix

from . import find_file, known_models
from .other_layers import Kind, Kinds, Selection, find_readers, read_kinds
from .transformers_model import (
    FORMULA,
    Counts,
    Experts,
    LayerReading,
    count_parameters,
    fill_in,
    is_complete,
)

# The layers of each pattern, from `layer_types` and windows of a config.json and from the JSON's section.
# layer_patterns.py combines the two; for a model object, models reads its masks.

_FULL = ("full_attention", "attention")
MAX_LAYERS = 1 << 16


def text_part(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the language model's part of a config.json, which reads more than text in some models."""
    inner = values.get("text_config")
    return inner if "hidden_size" not in values and isinstance(inner, dict) else values


def patterns_by(values: Mapping[str, Any]) -> tuple[Pattern, ...]:
    """Return the attention of every layer by a config.json.

    Args:
        values: of the file. Without `layer_types` all layers have the window or chunk that it names.

    Raises:
        RingConfigError: layers that are neither attention nor one of `other_layers.KNOWN`, keys of another
            kind, or an encoder-decoder.
    """
    if values.get("is_encoder_decoder"):
        raise _refused("is_encoder_decoder", "a model of one sequence", True, "plan its parts by --layers")
    text_values = text_part(values)
    return make_type_patterns(
        _types(text_values), lambda key: _width(text_values, key), _is_causal(text_values)
    )


def _is_causal(values: Mapping[str, Any]) -> bool:
    """Return whether the layers are causal: two keys make models bidirectional that else are causal."""
    both_ways = values.get("use_bidirectional_attention") in (True, "all")
    return values.get("is_causal") is not False and not both_ways


def read_hf_config(path_or_text: str) -> Json:
    """Return a config.json: by its path, its text, or the name of a model in `configs/models`.

    Raises:
        RingConfigError: no such name and no such file, or no JSON.
    """
    if not path_or_text.lstrip().startswith("{"):
        return read_object(find_file("--hf-config", path_or_text, known_models(), "a config.json", ".json"))
    return parse_object(path_or_text, "--hf-config")


def count_patterns(config: RingConfig, model_patterns: Sequence[Pattern | None], tokens: int) -> Mix:
    """Count the layers of each pattern, in the order of the layers; see `layer_patterns`."""
    return tuple(Counter(layer_patterns(config, model_patterns, tokens)).items())


def layer_patterns(
    config: RingConfig, model_patterns: Sequence[Pattern | None], tokens: int
) -> list[Pattern]:
    """Return the pattern of each layer.

    Args:
        config: the section; its "pattern" and "layers".
        model_patterns: the pattern of each layer, None where it is unknown.
        tokens: of the sequence.

    Raises:
        RingPatternError: the model and the JSON contradict each other.
        RingConfigError: "layers" names one that the model has not.
    """
    named = named_patterns(config)
    beyond = [layer for layer in named if layer >= len(model_patterns)]
    if beyond:
        expected = f"layers from 0 to {len(model_patterns) - 1}, which the model has"
        raise RingConfigError(f"pattern: layers: {sentence(expected, str(max(beyond)), 'leave it out')}")
    patterns, mixed = LayerPatterns(pattern_from_config(config), named), len(set(model_patterns)) > 1
    return [
        patterns.for_layer(tokens, model_pattern, layer, mixed)
        for layer, model_pattern in enumerate(model_patterns)
    ]


def _types(text_values: Mapping[str, Any]) -> Sequence[str]:
    count = text_values.get("num_hidden_layers")
    if type(count) is not int or not 1 <= count <= MAX_LAYERS:
        raise _refused("num_hidden_layers", "a whole number of at least 1", count, "correct it")
    known = (*_FULL, *NARROW, *find_readers(text_values))
    types = text_values.get("layer_types")
    if types is None and len(known) > len(_FULL) + len(NARROW):
        raise _refused("layer_types", "the type of each layer", types, "add it")
    if types is None:
        narrow = [word for word, key in NARROW.items() if _width(text_values, key)]
        return [narrow[0] if narrow else _FULL[0]] * count
    if (
        not isinstance(types, list)
        or len(types) != count
        or not all(isinstance(layer_type, str) for layer_type in types)
    ):
        raise _refused("layer_types", f"a list of {count} words, one for each layer", types, "correct it")
    unknown = [layer_type for layer_type in types if layer_type not in known]
    if unknown:
        advice = "such a layer is not known: plan the attention alone by --layers and the other sizes"
        raise _refused("layer_types", ", ".join(known), unknown[0], advice)
    return types


def _width(text_values: Mapping[str, Any], key: str) -> int | None:
    width = text_values.get(key)
    if width is not None and (type(width) is not int or width < 1):
        raise _refused(key, "a whole number of at least 1, or null", width, "correct it")
    return width if text_values.get("use_sliding_window", True) is not False else None


def _refused(key: str, expected: str, got: object, advice: str) -> RingConfigError:
    return RingConfigError(f"--hf-config: {key}: {sentence(expected, shown(got), advice)}")


# Sizes and parameters of a Llama-like block: grouped-query attention, gated MLP, RMS norms, no biases.

MAX_SIZE = 2**31  # of any size: products of three of them are still exact


class LatentShape(NamedTuple):
    """Describe multi-head latent attention: parts of a head, and the latents of a token."""

    nope: int  # N of a query and key, without rotary embedding
    rope: int  # R with it; keys share these
    value: int  # E
    latent: int  # L, of keys and values
    query_latent: int | None = None  # of queries, if they have one


@dataclass(frozen=True)
class ModelShape:
    """Describe the sizes of a decoder."""

    layers: int  # decoder layers
    hidden: int  # width of the residual stream
    # heads, kv_heads: query and K/V heads of a layer; heads is a multiple of kv_heads
    heads: int
    kv_heads: int
    head_dim: int  # D
    intermediate: int  # width of the MLP
    vocab: int  # rows of the embedding
    tied: bool = False  # the output matrix is the embedding
    # of multi-head latent attention; then head_dim is the mean of a key's and a value's, N + R and E
    latents: LatentShape | None = None
    experts: Experts | None = None  # instead of the MLP of `intermediate`, in every layer
    kinds: Kinds = ()  # of every layer, None for attention; empty where all are attention
    positions: int | None = None  # how far they reach by the file; None where it does not say
    counted: Counts | None = None  # parameters of its model; None: by the formula

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocab"):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= MAX_SIZE:
                bound = "of at least 1" if type(value) is not int or value < 1 else f"of at most {MAX_SIZE:,}"
                got = f"{value!r:.40}"
                raise RingConfigError(f"model: {name}: expected a whole number {bound}, got {got}")
        if self.heads % self.kv_heads:
            raise RingConfigError(
                f"model: heads: expected a multiple of {self.kv_heads} kv_heads, got {self.heads}"
            )

    @cached_property
    def attention_parameters(self) -> int:
        """Count the q, k, v and output projections of one layer."""
        if self.latents is not None:
            nope, rope, value, latent, query_latent = self.latents
            queries = self.heads * (nope + rope)
            of_queries = self.hidden * queries
            if query_latent is not None:
                of_queries = query_latent * (self.hidden + queries)
            of_keys = self.hidden * (latent + rope) + latent * self.heads * (nope + value)
            return of_queries + of_keys + self.heads * value * self.hidden
        return 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)

    @cached_property
    def other_layers(self) -> tuple[Kind, ...]:
        """Return what the layers that are not attention over all keys are, one for each of them."""
        return tuple(kind for kind in self.kinds if kind is not None)

    @cached_property
    def attention_layers(self) -> int:
        """Count the layers that have q, k and v: all but recurrences and convolutions."""
        return self.layers - sum(not isinstance(kind, Selection) for kind in self.other_layers)

    @cached_property
    def counts(self) -> Counts:
        """Count the parameters: those of its model, else by a formula without biases."""
        if self.counted is not None:
            return self.counted
        mixing = self.layers * self.attention_parameters
        width, largest, router = self.intermediate, self.hidden * self.intermediate, 0
        if self.experts is not None:
            router, width = self.experts.number, self.experts.number * self.experts.intermediate
            # gate and up projections of all experts are one tensor in transformers 5
            largest, width = 2 * width * self.hidden, width + self.experts.shared
        active_width, head = get_active_width(self.intermediate, self.experts), self.vocab * self.hidden
        mlp, active_mlp = (self.hidden * (3 * columns + router) for columns in (width, active_width))
        norms = 2 * self.hidden
        of_layers = self.layers * (mlp + norms) + mixing
        return Counts(
            of_layers + (1 if self.tied else 2) * head + self.hidden, mixing // self.layers + mlp + norms,
            mixing, self.layers * mlp, self.layers * active_mlp, active_width, head,
            max(head, largest, self.hidden * self.heads * self.head_dim),
        )  # fmt: skip

    @cached_property
    def mixing_parameters(self) -> int:
        """Return those of what mixes tokens, of all layers: attention's projections, and other kinds."""
        return self.counts.mixing

    @cached_property
    def mlp_parameters(self) -> int:
        """Return those of the MLP of one layer: of all experts, with the router."""
        return self.counts.mlp // self.layers

    @cached_property
    def active_mlp_parameters(self) -> int:
        """Return what a token multiplies with in the MLP of one layer."""
        return self.counts.active_mlp // self.layers

    @cached_property
    def active_experts(self) -> int:
        """Return the experts that a token runs; 0 in a model without them."""
        return 0 if self.experts is None else self.experts.active

    @cached_property
    def active_intermediate(self) -> int:
        """Return the width of the MLP that a token runs: of its experts together."""
        return self.counts.active_width

    @cached_property
    def mlp_saved(self) -> int:
        """Return how many tensors of its width an MLP saves."""
        return self.counts.mlp_saved

    @cached_property
    def layer_parameters(self) -> int:
        """Return the parameters of one layer, its two norms included; the mean of layers that differ."""
        return self.counts.layer

    @cached_property
    def head_parameters(self) -> int:
        """Return the output matrix, which may be the embedding."""
        return self.counts.head

    @cached_property
    def parameters(self) -> int:
        """Return all parameters, each once."""
        return self.counts.parameters

    @cached_property
    def largest_parameter(self) -> int:
        """Return the elements of the largest single tensor."""
        return self.counts.largest


def get_active_width(intermediate: int, experts: Experts | None) -> int:
    """Return the width of the MLP that a token runs: of its experts together."""
    return intermediate if experts is None else experts.active * experts.intermediate + experts.shared


_KEYS = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "intermediate": "intermediate_size",
    "vocab": "vocab_size",
}
_LENGTHENS = ("linear", "dynamic", "yarn")  # of rope scaling
_EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")
_ACTIVE = ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts", "num_experts_per_token")
_OPTIONS = ("layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocab")


def read_model(options: argparse.Namespace) -> ModelShape:
    """Return the model of --hf-config, or of --layers, --hidden, --heads, --vocab and what has defaults."""
    sizes = [name for name in _OPTIONS if getattr(options, name) is not None]
    if options.hf_config is not None:
        if sizes:
            raise RingConfigError(
                f"--hf-config: expected no sizes with it, got --{sizes[0].replace('_', '-')}; remove one"
            )
        return _from_transformers(options.hf_config)
    missing = [f"--{name}" for name in ("layers", "hidden", "heads", "vocab") if name not in sizes]
    if missing:
        raise RingConfigError(
            f"model: expected --hf-config config.json, or sizes, got no {', '.join(missing)}"
        )
    return ModelShape(
        options.layers,
        options.hidden,
        options.heads,
        options.kv_heads or options.heads,
        _head_dim(options.head_dim, options.hidden, options.heads),
        options.intermediate or 4 * options.hidden,
        options.vocab,
    )


def read_complete_config(path_or_text: str) -> Mapping[str, Any]:
    """Return the language model's part of a config.json, with transformers' values of what it leaves out.

    Raises:
        RingConfigError: only transformers could tell, and it is not installed or does not know the model.
    """
    whole = _read_whole(path_or_text)
    return whole if is_complete(whole) else fill_in(whole)


def _read_whole(path_or_text: str) -> Mapping[str, Any]:
    """Return a config.json; where it has no type, its language model's part."""
    whole = read_hf_config(path_or_text)
    return whole if "model_type" in whole else text_part(whole)


def _head_dim(head_dim: int | None, hidden: int, heads: int) -> int:
    if head_dim is not None:
        return head_dim
    if heads > 0 and hidden % heads:
        raise RingConfigError.wrong(
            "model: hidden", f"a multiple of {heads} heads", hidden, "give --head-dim"
        )
    return hidden // max(heads, 1)


def _from_transformers(path_or_text: str) -> ModelShape:
    """Return the model of a config.json, its text or a known name."""
    whole, (shape, values) = _read_whole(path_or_text), _read_shape(path_or_text)
    if whole.get("model_type") in (None, *FORMULA):
        return shape
    checked = shape.latents is None
    layers = LayerReading(
        _is_causal(values), checked * shape.heads * shape.head_dim, checked * shape.kv_heads * shape.head_dim,
        [kind is None for kind in shape.kinds], shape.experts, shape.hidden,
    )  # fmt: skip
    counts = count_parameters(whole, layers)
    experts = shape.experts if counts.active_mlp < counts.mlp else None  # which no layer may have
    return replace(shape, counted=counts, experts=experts)


def _read_shape(path_or_text: str) -> tuple[ModelShape, Mapping[str, Any]]:
    values = read_complete_config(path_or_text)
    sizes = {}
    for name, key in _KEYS.items():
        if not isinstance(values.get(key), int) or isinstance(values.get(key), bool):
            near = did_you_mean(key, [word for word in values if word not in _KEYS.values()])
            # A key with a wrong value is no misspelt one.
            misspelt = near is not None and key not in values
            advice = f"did you mean '{near}'?" if misspelt else "give --layers and the other sizes instead"
            raise RingConfigError(
                f"--hf-config: {key}: expected a whole number, got {shown(values.get(key))}; {advice}"
            )
        sizes[name] = values[key]
    latents, head_dim = _latents(values), _optional(values, "head_dim")
    kv_heads = _optional(values, "num_key_value_heads") or sizes["heads"]
    if latents is not None:
        kv_heads = sizes["heads"]
        head_dim = (latents.nope + latents.rope + latents.value) // 2
    shape = ModelShape(
        **sizes,
        kv_heads=kv_heads,
        head_dim=_head_dim(head_dim, sizes["hidden"], sizes["heads"]),
        latents=latents,
        experts=_experts(values, sizes["intermediate"]),
        kinds=read_kinds(values, _types(values)),
        tied=bool(values.get("tie_word_embeddings", False)),
        positions=_read_positions(values),
    )
    return shape, values


def read_heads(hf_config: str) -> tuple[int, int, int]:
    """Return query heads, K/V heads and head_dim of a config.json, its text or a known name.

    Raises:
        RingConfigError: it cannot be read, or its attention has latents in place of K/V heads.
    """
    model, _ = _read_shape(hf_config)
    if model.latents is not None:
        raise _refused("kv_lora_rank", "attention with K/V heads", "latents", "give --heads and --head-dim")
    return model.heads, model.kv_heads, model.head_dim


def _experts(values: Mapping[str, Any], intermediate: int) -> Experts | None:
    """Return the experts of a config.json; None for a model that has one MLP a layer."""
    count = max(_optional(values, key) or 0 for key in _EXPERTS)
    if count < 2:
        return None
    active = next((n for key in _ACTIVE if (n := _optional(values, key))), None)
    if active is None or active > count:
        raise _refused(_ACTIVE[0], f"how many of {count} experts a token runs", active, "correct it")
    width = _optional(values, "moe_intermediate_size") or intermediate
    shared = _optional(values, "shared_expert_intermediate_size")
    if shared is None:
        shared = (_optional(values, "n_shared_experts") or 0) * width
    return Experts(count, active, width, shared)


# transformers' "linear", "dynamic" and "yarn" reach as far as the factor says, or as far as
# `max_position_embeddings`, which may count the factor already; "longrope" and "llama3" as far as that key.
def _read_positions(values: Mapping[str, Any]) -> int | None:
    """Return how far positions reach; None where the file does not say."""
    most = _optional(values, "max_position_embeddings")
    rope = values.get("rope_scaling") or values.get("rope_parameters")
    if most is None or not isinstance(rope, dict) or not isinstance(rope.get("factor"), (int, float)):
        return most
    kind, first = rope.get("rope_type", rope.get("type")), _optional(rope, "original_max_position_embeddings")
    return max(most, int(rope["factor"] * (first or most))) if kind in _LENGTHENS else most


def _latents(values: Mapping[str, Any]) -> LatentShape | None:
    """Return the sizes of multi-head latent attention; None for other models."""
    names = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank")
    sizes = [_optional(values, name) for name in names]
    if None in sizes:
        return None
    nope, rope, value, latent = (size or 0 for size in sizes)
    return LatentShape(nope, rope, value, latent, _optional(values, "q_lora_rank"))


def _optional(values: Mapping[str, Any], key: str) -> int | None:
    value = values.get(key)
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    raise RingConfigError(f"--hf-config: {key}: expected a whole number or null, got {shown(value)}")
