"""Which models compute attention in their own code, and what a ring patches in them: the table's row."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ds_ring.contrib.families.eager_attention.families import (
    FAMILIES,
    REFUSED,
    Family,
    find_family,
)
from ds_ring.contrib.families.eager_attention.scores import (
    EagerScores,
    ModuleAttention,
    ScoreOperators,
    unexpected,
)
from ds_ring.data.batch import SHARDING, Batch
from ds_ring.data.batch_sharding import BatchSharding
from ds_ring.data.packing import DOCUMENT_IDS
from ds_ring.errors import RingConfigError, RingPatternError
from ds_ring.models.attention_name import NAME
from ds_ring.models.checks import (
    OWN_TOKENS,
    cannot_run,
    not_compiled,
    refuse_other_inputs,
)
from ds_ring.models.layer_masks import LayerMask
from ds_ring.models.model import MODEL, TABLE
from ds_ring.models.variant import (
    INTERFACE,
    POSITIONS,
    AttachRequest,
    Variant,
    get_own_attention_advice,
)
from ds_ring.patches import patch

if TYPE_CHECKING:
    from ds_ring.models.model_adapter import ModelAdapter
    from ds_ring.models.model_call import ModelCall

_patch = partial(patch, when="the attention bypasses transformers' interface")
_attention_patch = _patch(
    TABLE.given("eager", "torch.nn.Module"), "forward", stage="around_forward", feature="eager attention",
    reason="computes the module's own softmax(q @ k.T) @ v on the ring",
)  # fmt: skip
_layer_patch = _patch(
    TABLE.given("checkpointed", "torch.nn.Module"), stage="before_forward", feature="eager attention.layer",
    reason="the mask of a layer knows its batch, also when a checkpointed layer runs again",
)  # fmt: skip
_call_patch = _patch(
    MODEL, stage="before_forward", feature="own positions", reason="notes the positions of the batch"
)
_positions_patch = _patch(
    TABLE.given("numbers", "torch.nn.Module"), "forward", stage="around_forward", feature="own positions",
    reason="numbers tokens by the batch's positions",
)  # fmt: skip


_switches = _patch(
    TABLE.given("draws_blocks"), "set_attention_type", stage="at_initialize", kind="registered",
    feature="eager attention.dense", reason="attends to all keys, as the model does up to a length",
)  # fmt: skip


class EagerVariant(Variant):
    """Models that compute attention in their own code, or number their tokens by themselves."""

    def matches(self, module: nn.Module) -> bool:
        return isinstance(module, PreTrainedModel) and find_family(module) is not None

    def refuse(self, model: PreTrainedModel, request: AttachRequest) -> None:
        config, family = model.config.get_text_config(), find_family(model)
        if config.model_type in REFUSED:
            raise cannot_run(model, f"{REFUSED[config.model_type]}, {OWN_TOKENS}")
        if request.as_is and getattr(config, "alibi", False):
            raise cannot_run(model, 'config.alibi adds a distance to each score; set "attention": "ring"')
        pair = getattr(model.config, "is_encoder_decoder", False)
        if config.model_type == "bigbird_pegasus" and pair and config.attention_type == "block_sparse":
            raise draws_blocks(model)
        if family is None or request.as_is:
            return
        if family.positions not in ("", *(type(part).__name__ for part in model.modules())):
            advice = "choose these (TrOCR: use_learned_position_embeddings)"
            raise cannot_run(model, f"it numbers its tokens otherwise than by {family.positions}; {advice}")

    def covers(self, model: PreTrainedModel, as_is: bool) -> set[str]:
        return {INTERFACE, POSITIONS} if self.matches(model) and not as_is else set()

    def advice(self, kind: type[PreTrainedModel]) -> str | None:
        return get_own_attention_advice(kind, FAMILIES)

    def makes_full_masks(self, model_type: str) -> bool:
        return model_type in FAMILIES

    def positioned(self, model: PreTrainedModel) -> Iterator[nn.Module]:
        yield from (module for _, _, module in find_parts(model))

    def install(self, adapter: ModelAdapter) -> None:
        if adapter.rewritten or not any(map(self.matches, adapter.model.modules())):
            return
        family = find_family(adapter.model)
        if family is not None and family.by_length:
            adapter.session.needs.number_tokens = partial(_padding_last, adapter.model.config.pad_index)
        numbered = _NumberedCall(adapter)
        is_known = self.matches(adapter.model) and adapter.call.one_sequence
        if is_known:
            adapter.apply(numbered.hook(), model=adapter.model)
        for part in adapter.model.modules():
            if self.matches(part) and hasattr(part, "set_attention_type") and draws(part):
                if not is_known:
                    raise draws_blocks(part)
                adapter.apply(get_switch(part), draws_blocks=part)
        for part, family, module in find_parts(adapter.model):
            if type(module).__name__ == family.positions:
                around = wrap_positions(part, family, module, partial(numbered.position_ids, module))
                adapter.apply(around, numbers=module)
            else:
                around = around_attention(part, family, module, adapter.call, adapter.implementations[part])
                adapter.apply(around, eager=module)
        for layer in find_layers(adapter.model):
            adapter.apply(tell_mask(adapter.call, layer), checkpointed=layer)


def _padding_last(padding: int, prepared: Batch) -> Tensor:
    """Return the position ids of a whole batch of a model that counts the tokens that are no padding.

    Raises:
        RingPatternError: padding in a row or a document before other tokens; one process would hide these.
    """
    ids_BT = prepared.get("input_ids")
    if ids_BT is not None:
        is_next_BT = (ids_BT[:, :-1] == padding) & (ids_BT[:, 1:] != padding)
        documents_BT = prepared.get(DOCUMENT_IDS)
        if documents_BT is not None:
            is_next_BT &= (documents_BT.diff(dim=-1) == 0) & (documents_BT[:, 1:] >= 0)
        if bool(is_next_BT.any()):
            raise RingPatternError.wrong(
                "input_ids",
                f"padding (config.pad_index, {padding}) at the end",
                "some before other tokens",
                "XLM takes as many of the last tokens for padding; use another token, or documents",
            )
    return prepared["position_ids"]


def draws_blocks(model: Any, where: str = "") -> RingConfigError:
    """Return the error of a model that draws blocks of keys at random."""
    draws = f'config.attention_type "block_sparse" draws blocks of keys at random{where}'
    return cannot_run(model, f'{draws}; set it to "original_full", if that is your model')


def draws(part: Any) -> bool:
    """Return whether the layers of a model draw blocks of keys for long batches, and none was short yet."""
    family = find_family(part)
    may = family is not None and family.dense_up_to(part.config) is not None
    return may and part.attention_type == "block_sparse"


def get_switch(part: Any) -> Callable[..., Any]:
    """Return what makes a model attend to all keys, as it does by itself with the first short batch."""

    @_switches
    def switch() -> Callable[[], None]:
        part.set_attention_type("original_full")
        return lambda: part.set_attention_type("block_sparse")

    return switch


def _asks_interface(kind: type[nn.Module]) -> bool:
    """Return whether a class hands its attention to transformers' interface (GPT-J's, from 5.24 on)."""
    return "ALL_ATTENTION_FUNCTIONS" in inspect.unwrap(kind.forward).__code__.co_names


def find_parts(model: nn.Module) -> list[tuple[PreTrainedModel, Family, nn.Module]]:
    """Return the modules inside `model` that a family names, each once."""
    parts: dict[int, tuple[PreTrainedModel, Family, nn.Module]] = {}
    for part in (part for part in model.modules() if isinstance(part, PreTrainedModel)):
        family = find_family(part)
        for module in part.modules() if family is not None else ():
            assert family is not None
            kind = type(module)
            if kind.__name__ == family.positions or (
                kind.__name__ == family.attention and not _asks_interface(kind)
            ):
                parts.setdefault(id(module), (part, family, module))
    return list(parts.values())


def around_attention(
    model: PreTrainedModel, family: Family, module: nn.Module, call: ModelCall, implementation: str
) -> Callable[..., Any]:
    """Return what runs in place of the forward of a module that computes attention eagerly.

    `implementation`: the attention that the model has without a ring.
    """

    @_attention_patch
    def around(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if model.config._attn_implementation != NAME:
            return forward(*args, **kwargs)  # engine.ring.off()
        if torch.compiler.is_compiling():
            raise not_compiled(type(module).__name__, "computes attention in its own code")
        arguments = (*args, *kwargs.values())
        mask = next((x for x in arguments if isinstance(x, LayerMask)), None)
        used = call.get_mask(module) if mask is None else mask
        sharding = None if used is None else used.sharding
        sharding = call.get_sharding(module) if sharding is None else sharding
        samples = next(x for x in arguments if isinstance(x, Tensor)).shape[0]
        attend = ModuleAttention(module, model.config, family, sharding, used, samples, implementation)
        operators = ScoreOperators(attend)
        with operators:
            output = forward(
                *(None if isinstance(x, LayerMask) else x for x in args),
                **{key: None if isinstance(x, LayerMask) else x for key, x in kwargs.items()},
            )
        if operators.scores is None:
            raise unexpected(module, "computes no product of queries and keys")
        if isinstance(output, tuple | list):
            return type(output)(None if isinstance(x, EagerScores) else x for x in output)
        return output

    return around


def tell_mask(call: ModelCall, layer: nn.Module) -> Callable[..., Any]:
    """Return the hook by which a layer's mask knows its batch, also when the layer is run again."""

    # Hooks of a layer run outside of the checkpointed function, which keeps the arguments of the first run.
    @_layer_patch
    def before(
        _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        def add_sharding(x: Any) -> Any:
            return replace(x, sharding=call.get_sharding(layer)) if isinstance(x, LayerMask) else x

        return tuple(map(add_sharding, args)), {key: add_sharding(x) for key, x in kwargs.items()}

    return before


def find_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers of the models of `FAMILIES` inside `model`."""
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel) and find_family(part)]
    layers = {id(layer): layer for part in parts for layer in part.modules()}
    return [layer for layer in layers.values() if isinstance(layer, GradientCheckpointingLayer)]


class _NumberedCall:
    """Note the positions of a model's tokens, for the modules of it that number tokens by themselves."""

    def __init__(self, adapter: ModelAdapter) -> None:
        self._call, self._signature = adapter.call, adapter.call.signature
        self._noted: Tensor | None = None

    def hook(self) -> Callable[..., Any]:
        """Return the hook of the model, which runs after that of its call."""

        @_call_patch
        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            refuse_other_inputs(self._call.name, kwargs)
            family, tokens = find_family(self._call.model), kwargs[SHARDING].layout.tokens
            most = None if family is None else family.dense_up_to(self._call.model.config)
            if most is not None and tokens > most:
                raise draws_blocks(self._call.model, f" for more than {most} tokens, got {tokens}")
            arguments = dict(self._signature.bind_partial(*args, **kwargs).arguments) | kwargs
            ids = arguments["inputs_embeds"] if arguments.get("input_ids") is None else arguments["input_ids"]
            if family is not None and family.by_length:  # nothing attends to padding
                kwargs = kwargs | {"lengths": torch.full(ids.shape[:1], ids.shape[1], device=ids.device)}
            position_ids = arguments.get("position_ids")
            if position_ids is None:  # in a generation
                self._noted = _read_positions(arguments[SHARDING], ids.device).expand(ids.shape[0], -1)
                return args, kwargs
            self._noted = position_ids.expand(ids.shape[0], -1)  # XLM asks for each sample's
            return args, kwargs | {"position_ids": self._noted}

        return before

    def position_ids(self, module: nn.Module) -> Tensor | None:
        """Return the positions of the tokens that a module gets; None before the first call."""
        positions = self._call.position_ids(module)
        return self._noted if positions is None else positions


def _read_positions(sharding: BatchSharding, device: torch.device) -> Tensor:
    """Return the positions of local tokens in the sequence, [S]; 0 for padding of the layout."""
    if sharding.is_replicated:
        positions: Tensor = sharding.q_positions  # type: ignore[attr-defined]
        return positions.to(device)
    slots = sharding.with_slots(device).slots
    assert slots is not None
    return slots.clamp_min(0)


def wrap_positions(
    model: PreTrainedModel, family: Family, module: nn.Module, position_ids: Callable[[], Tensor | None]
) -> Callable[..., Tensor]:
    """Return what runs in place of the forward of a module that numbers tokens by itself."""

    @_positions_patch
    def around(forward: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        noted = position_ids()
        if model.config._attn_implementation != NAME or noted is None:
            return forward(*args, **kwargs)
        assert family.numbered is not None
        return family.numbered(module, noted, forward, args[0])

    return around
