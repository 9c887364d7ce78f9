"""Ask transformers about a config.json: the values that it leaves out, and the parameters of its model.

Owns which model types `ModelShape` counts by its formula. A model of another type is made on the meta device,
without its numbers, and its parameters are counted; transformers is imported for these only, and for files
that leave out what has another default in each type.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from ds_ring.config.messages import shown
from ds_ring.config.problems import did_you_mean
from ds_ring.errors import RingConfigError

# Types whose layers are alike: q, k, v and output projections, and a gated MLP or experts of gated MLPs.
# tests/unit/launcher/plan/test_model_types.py compares the formula with their models.
FORMULA = frozenset((
    "cohere", "cohere2", "exaone4", "gemma", "gemma2", "glm", "glm4", "gpt_oss", "granite", "granitemoe",
    "helium", "hyperclovax", "internlm3", "llama", "minimax_m2", "ministral3", "mistral", "mixtral", "olmo",
    "olmo2", "olmo3", "olmoe", "phi3", "phimoe", "qwen2", "qwen3", "qwen3_moe", "seed_oss", "smollm3",
))  # fmt: skip
# Keys whose defaults differ by type. Llama's are those of `ModelShape`, and of a file without a type.
_OPEN = ("num_key_value_heads", "head_dim", "tie_word_embeddings")
_SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
# Further names of the MLP's width, which transformers' configurations do not map to `intermediate_size`.
_WIDTHS = ("ffn_dim", "n_inner", "dense_intermediate_size", "moe_intermediate_size")
_MIXES = re.compile(r"attn|attention|mixer|mamba|conv|recurrent|temporal")  # names of what mixes tokens
_PROJECTIONS = {
    "q": "q_proj", "query": "q_proj", "k": "k_proj", "key": "k_proj",
    "qkv": "qkv", "wqkv": "qkv", "query_key_value": "qkv", "c_attn": "qkv",
}  # fmt: skip
_PLAIN, _GATED = 2, 3  # matrices of an MLP


class Counts(NamedTuple):
    """Count the parameters of a model, all of them and by part."""

    parameters: int  # of the whole model, each once
    layer: int  # of a layer; the mean of layers that differ
    mixing: int  # of what mixes tokens, of all layers
    mlp: int  # of the MLPs of all layers
    active_mlp: int  # of these, that a token multiplies with
    active_width: int  # of the MLP that a token runs; the mean of layers that differ
    head: int  # the output matrix, which may be the embedding
    largest: int  # tensor
    # tensors of an MLP's width that are saved: of Llama's the gate, silu(gate), up and their product
    mlp_saved: int = 4


class Experts(NamedTuple):
    """Describe a mixture of experts: a gated MLP each, of which a token runs some."""

    number: int  # of a layer
    active: int  # that a token runs
    intermediate: int  # width of one
    shared: int = 0  # width of those together that every token runs


def is_complete(values: Mapping[str, Any]) -> bool:
    """Return whether a config.json says all that the plan reads, but for defaults of Llama."""
    if values.get("model_type") in (None, "llama"):
        return True
    narrow = values.get("use_sliding_window") is not False and values.get("sliding_window", 0) is not None
    uneven = values.get("mlp_only_layers") or values.get("decoder_sparse_step", 1) != 1
    whole = all(key in values for key in _OPEN) and ("layer_types" in values or not narrow)
    return values["model_type"] in FORMULA and whole and not uneven


def fill_in(whole: Mapping[str, Any]) -> dict[str, Any]:
    """Return the language model's part of a config.json with transformers' values of what it leaves out.

    Raises:
        RingConfigError: transformers is not installed, does not know the model type, or refuses the file.
    """
    config = _make_config(json.dumps(whole))
    text = config.get_text_config(decoder=True)
    written = whole.get("text_config") if text is not config else None
    try:
        _refuse_misspelt(text, written if isinstance(written, dict) else whole)
        values = {name: getattr(text, name, None) for name in text.attribute_map} | text.to_dict()
    except RingConfigError:
        raise
    except Exception as error:  # transformers' own: a size that differs by layer
        raise _make_error(config.model_type, str(error)) from None
    if values.get("intermediate_size") is None:
        widths = (values.get(name) for name in _WIDTHS)
        hidden = values.get("hidden_size")
        default = 4 * hidden if isinstance(hidden, int) else None
        values["intermediate_size"] = next((width for width in widths if width is not None), default)
    return values


def _refuse_misspelt(text: Any, written: Mapping[str, Any]) -> None:
    """Refuse a file without a size, and with a word like its name: transformers takes its default then."""
    names: Mapping[str, str] = text.attribute_map
    words = [word for word in written if not hasattr(type(text), word)]
    for key in _SIZES:
        near = did_you_mean(key, words)
        if key not in written and names.get(key) not in written and near is not None:
            raise RingConfigError(
                f"--hf-config: {key}: expected a whole number, got null; did you mean '{near}'?"
            )


@lru_cache(maxsize=4)
def _make_config(text: str) -> Any:
    values = json.loads(text)
    model_type = values.pop("model_type", None)
    try:
        from transformers import CONFIG_MAPPING, logging
    except ImportError:
        advice = 'pip install transformers, or write all sizes, "layer_types" and "tie_word_embeddings"'
        if model_type not in FORMULA:
            advice = "pip install transformers, or give --layers and the other sizes instead"
        raise RingConfigError(
            f"--hf-config: model_type: expected transformers to read {shown(model_type)}, got no"
            f" transformers; {advice}"
        ) from None
    logging.set_verbosity_error()
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        near = did_you_mean(str(model_type), list(CONFIG_MAPPING))
        advice = "give --layers and the other sizes instead" if near is None else f"did you mean '{near}'?"
        raise RingConfigError(
            f"--hf-config: model_type: expected one of the installed transformers, got {shown(model_type)};"
            f" {advice}"
        )
    try:
        return CONFIG_MAPPING[model_type].from_dict(values)
    except Exception as error:  # transformers validates with errors of its own
        problem = f"transformers cannot make it: {type(error).__name__}: {error}"
        raise _make_error(model_type, problem) from None


def _make_error(model_type: str, problem: str) -> RingConfigError:
    return RingConfigError(
        f'--hf-config: model_type: expected a model that can be planned by its file, got "{model_type}":'
        f" {' '.join(problem.split())}; give --layers and the other sizes instead"
    )


class LayerReading(NamedTuple):
    """Hold what the plan has read of the layers, which must be what the model has."""

    causal: bool
    # query_elements, kv_elements: of a token's q of all heads, and of its K; 0: not checked (latents)
    query_elements: int
    kv_elements: int
    is_attention: Sequence[bool]  # of each layer, over all keys
    experts: Experts | None
    hidden: int


def count_parameters(whole: Mapping[str, Any], reading: LayerReading) -> Counts:
    """Return the parameters of the model of a config.json.

    Raises:
        RingConfigError: transformers cannot make the model, or its layers are not those that were read.
    """
    config = _make_config(json.dumps(whole))
    model = _make_model(config)
    model_type, layers = str(config.model_type), _find_layers(model, len(reading.is_attention))
    if layers is None:
        expected = len(reading.is_attention)
        raise _make_error(model_type, f"its model has no list of {expected} layers, which run once each")
    mixing = mlp = active_mlp = 0
    largest: list[int] = []  # how many matrices of a layer's MLP have the largest size
    for layer, is_attention in zip(layers, reading.is_attention, strict=True):
        parts: dict[bool, list[int]] = {True: [], False: []}  # sizes of what mixes tokens, and of the MLP
        for name, child in layer.named_children():
            mixes = _MIXES.search(name) is not None
            matrices = [(key, x) for key, x in child.named_parameters(name) if x.dim() > 1]
            if not matrices:  # a norm
                continue
            sizes = [x.numel() for _, x in matrices]
            active = sum(_count_active(key, x, reading.experts) for key, x in matrices)
            parts[mixes] += sizes
            mixing += active * mixes
            active_mlp += active * (not mixes)
            if mixes and is_attention:
                _check_attention(model_type, child, reading)
        if not all(parts.values()):
            names = ", ".join(name for name, _ in layer.named_children())
            raise _make_error(model_type, f"its layers are not attention and an MLP: {names}")
        mlp += sum(parts[False])
        largest.append(parts[False].count(max(parts[False])))
    numbers = [x.numel() for x in model.parameters()]
    head = model.get_output_embeddings()
    # A gated MLP has three of that size, or one: gate and up together.
    mlp_matrices = _PLAIN if set(largest) == {_PLAIN} else _GATED
    return Counts(
        parameters=sum(numbers),
        layer=sum(x.numel() for x in layers.parameters()) // len(layers),
        mixing=mixing,
        mlp=mlp,
        active_mlp=active_mlp,
        active_width=round(active_mlp / (len(layers) * reading.hidden * mlp_matrices)),
        head=head.weight.numel() if hasattr(head, "weight") else 0,
        largest=max(numbers),
        mlp_saved=_count_saved(layers[0]) + 2 * (mlp_matrices == _GATED),
    )


def _count_saved(layer: Any) -> int:
    """Return how many tensors the activation of an MLP saves; its output, which a matrix saves, included."""
    import torch

    names = ((path.rpartition(".")[2], module) for path, module in layer.named_modules())
    activation = next((part for name, part in names if name.startswith("act")), torch.nn.functional.silu)
    saved: list[torch.Tensor] = []

    def save(x: torch.Tensor) -> torch.Tensor:
        saved.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(save, lambda x: x):
        x = torch.empty(1, 8, device="meta", requires_grad=True)
        saved.append(activation(x))
    return len({tensor.untyped_storage()._cdata for tensor in saved if tensor.numel() == x.numel()})


def _make_model(config: Any) -> Any:
    """Return the model of a configuration on the meta device."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    for auto in (AutoModelForCausalLM, AutoModelForImageTextToText):
        if type(config) in auto._model_mapping:
            try:
                with torch.device("meta"):
                    return auto.from_config(config, trust_remote_code=False)
            except Exception as error:  # any of the model's own code
                problem = f"transformers cannot make its model: {type(error).__name__}: {error}"
                raise _make_error(config.model_type, problem) from None
    raise _make_error(config.model_type, "transformers has no causal language model of this type")


def _find_layers(model: Any, count: int) -> Any:
    """Return the list of the language model's layers; None if none has as many."""
    from torch.nn import ModuleList

    parts = (*model.get_decoder().modules(), *model.modules())
    return next((part for part in parts if isinstance(part, ModuleList) and len(part) == count), None)


def _count_active(key: str, x: Any, experts: Experts | None) -> int:
    """Return the elements of a tensor that a token multiplies with: of experts, those of some."""
    size = int(x.numel())
    if experts is None or not ((x.dim() == 3 and x.shape[0] == experts.number) or ".experts." in key):
        return size
    return size * experts.active // experts.number


def _check_attention(model_type: str, part: Any, reading: LayerReading) -> None:
    """Refuse attention of another kind, or of other heads, than was read of the file."""
    causal = {module.is_causal for module in part.modules() if hasattr(module, "is_causal")}
    if reading.causal and causal != {True}:
        problem = "its attention does not say whether it is causal"
        if causal:
            problem = """its attention is not causal, which --pattern '{"causal": false}' plans by sizes"""
        raise _make_error(model_type, problem)
    if not reading.kv_elements:
        return
    queries, keys = reading.query_elements, reading.kv_elements
    # with a gate of the output, queries have as many elements again
    possible = {"q_proj": {queries, 2 * queries}, "k_proj": {keys}, "qkv": {queries + 2 * keys}}
    projections = list(_list_projections(part))
    wrong = [f"{name} makes {size:,}" for name, size in projections if size not in possible[name]]
    if wrong or not {"k_proj", "qkv"} & {name for name, _ in projections}:
        problem = wrong[0] if wrong else "no projection is known by its name"
        raise _make_error(
            model_type, f"its attention has not {queries:,} elements a query and {keys:,} a key: {problem}"
        )


def _list_projections(part: Any) -> Iterator[tuple[str, int]]:
    """Yield the projections of q, of k, and of q, k and v together, with the elements that they make."""
    for path, module in part.named_modules():
        name = _PROJECTIONS.get(path.rpartition(".")[2].lower().removesuffix("_proj"))
        if name is not None and hasattr(module, "weight"):
            yield name, int(getattr(module, "nf", module.weight.shape[0]))  # nf: of GPT-2's Conv1D
