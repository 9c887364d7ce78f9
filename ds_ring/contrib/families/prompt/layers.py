"""A learned prompt in front of the tokens, and a learned bias for each bucket of distances: CPM-Ant.

Prompt and tokens see each other, both ways. A score has the bias of the pair's distance within the prompt and
within the tokens, and one number for all pairs of both. On a ring the prompt's tokens are those of rank 0, in
front of its others. `DistanceBiasAttention` computes the pairs within each part. The pairs of both are a pass
of the usual kernel, whose log-sum-exps get the number. The two merge.

Shapes: B samples, H query heads, S local tokens, L local tokens with the prompt's, D head dim, R distances.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from ds_ring.attention_module import RingAttention
from ds_ring.data.batch import Batch
from ds_ring.data.batch_sharding import BatchSharding
from ds_ring.data.packing import DOCUMENT_IDS
from ds_ring.errors import RingConfigError, RingPatternError
from ds_ring.layers.distance_bias.attention import DistanceBiasAttention
from ds_ring.layers.parts import merged
from ds_ring.masks.branches import Branch, in_range
from ds_ring.masks.catalog import Full
from ds_ring.masks.pattern import Pattern, QueryHead
from ds_ring.masks.slots import IntArray
from ds_ring.masks.tiles import UNBOUNDED
from ds_ring.models.attention_call import check_attention_call
from ds_ring.models.attention_name import NAME
from ds_ring.models.checks import cannot_run, not_compiled
from ds_ring.models.layer_masks import choose_layer_pattern
from ds_ring.models.model import PRETRAINED, TABLE
from ds_ring.models.variant import (
    INTERFACE,
    POSITIONS,
    AttachRequest,
    Variant,
    find_forward_home,
    get_own_attention_advice,
)
from ds_ring.patches import patch
from ds_ring.schedule.layout import Layout

if TYPE_CHECKING:
    from ds_ring.models.model_adapter import ModelAdapter
    from ds_ring.models.model_call import ModelCall

_patch = partial(
    patch, stage="around_forward", feature="prompt", when="a model puts a prompt in front of tokens (CPM-Ant)"
)
_model_patch = _patch(
    TABLE.given("prompted", PRETRAINED), "forward",
    reason="gives the prompt to rank 0; calls the original without a ring",
)  # fmt: skip
_attention_patch = _patch(
    TABLE.given("attends_to_prompt", "torch.nn.Module"), "forward",
    reason="computes the module's attention on the ring; calls the original without a ring",
)  # fmt: skip
_TYPE = "cpmant"
_OF_PROMPT, _OF_TOKENS = 0, 2  # segments


@dataclass(frozen=True)
class Parts(Pattern):
    """Attend within the first `prompt` positions and within the others, or from each part to the other."""

    prompt: int
    crosses: bool

    def branches(self, head: QueryHead) -> tuple[Branch, ...]:
        sides = in_range(0, self.prompt), in_range(self.prompt, UNBOUNDED)
        keys = sides[::-1] if self.crosses else sides
        return tuple(Branch(of_queries, of_keys) for of_queries, of_keys in zip(sides, keys, strict=True))


@dataclass(frozen=True)
class PromptedLayout(Layout):
    """Put a prompt in front of the sequence of `base`, on rank 0."""

    name = "prompted"
    base: Layout | None = None

    @classmethod
    def before(cls, base: Layout, prompt: int) -> PromptedLayout:
        """Return the layout of `prompt` tokens and those of `base`."""
        return cls(base.tokens + prompt, base.ring_size, base.multiple_of, base)

    def runs(self, ring_rank: int) -> IntArray:
        assert self.base is not None, "made by PromptedLayout.before"
        prompt = self.tokens - self.base.tokens
        runs = self.base.runs(ring_rank) + np.array([prompt, 0, 0])
        return np.concatenate([np.array([[0, 1, prompt]]), runs]) if ring_rank == 0 else runs

    def __str__(self) -> str:
        return f"{super().__str__()}, a prompt before the {self.base}"


@dataclass(frozen=True, eq=False)
class PromptBias:
    """What a model hands to its layers in place of the bias of all pairs.

    Attributes:
        sharding: of the batch without the prompt.
        prompt: tokens of it.
        profiles_H1R: the bias within each part, from the distance `first` on.
        crossing_HL: the bias of each local query for keys of the other part.
    """

    sharding: BatchSharding
    prompt: int
    profiles_H1R: Tensor
    first: int
    crossing_HL: Tensor

    def attend(self, q_BHLD: Tensor, k_BHLD: Tensor, v_BHLD: Tensor, scale: float) -> Tensor:
        """Return attention [B, H, L, D] of prompt and tokens; slots of padding get zeros."""
        mesh, config = self.sharding.mesh, self.sharding.config
        layout = PromptedLayout.before(self.sharding.layout, self.prompt)
        tokens, slots = layout.valid_tokens(mesh.ring_rank), q_BHLD.shape[2]

        def attention(kind: type[RingAttention], crosses: bool) -> RingAttention:
            pattern = Parts(self.prompt, crosses)
            make = partial(kind, config, pattern=pattern, mesh=mesh, layout=layout, scale=scale)
            return self.sharding.cached((pattern, scale), make)

        def to_layout(x: Tensor) -> Tensor:  # of [B, H, L, D]
            return pad(x[:, :, :tokens], (0, 0, 0, layout.local_tokens - tokens))

        q, k, v = map(to_layout, (q_BHLD, k_BHLD, v_BHLD))
        wide = torch.cat([q, torch.ones_like(q[..., :1])], dim=-1)
        within = attention(DistanceBiasAttention, False)(
            wide, k, v, profiles=self.profiles_H1R.to(q.dtype), first=self.first, return_lse=True
        )
        out, lse = attention(RingAttention, True)(q, k, v, return_lse=True)
        crossing = to_layout(self.crossing_HL[None, :, :, None])[..., 0]
        result, _ = merged(within, (out, lse + crossing.to(lse.dtype)))
        return pad(result[:, :, :tokens], (0, 0, 0, slots - tokens))


class LearnedPrompt(Variant):
    """Models that put a prompt of their own in front of the tokens."""

    def matches(self, module: nn.Module) -> bool:
        return isinstance(module, PreTrainedModel) and module.config.model_type == _TYPE

    def refuse(self, model: PreTrainedModel, request: AttachRequest) -> None:
        if not self.matches(model):
            return
        if request.as_is:
            advice = 'set "attention": "ring" in the section, and build it without attn_implementation'
            raise cannot_run(model, f"it puts a prompt in front of the tokens; {advice}")
        if request.config.ulysses_size > 1:
            raise cannot_run(model, "its prompt is of one rank of a ring; leave ulysses_size out")

    def covers(self, model: PreTrainedModel, as_is: bool) -> set[str]:
        known = find_forward_home(model).startswith("transformers.models.") and self.matches(model)
        return {INTERFACE, POSITIONS} if known and not as_is else set()

    def advice(self, kind: type[PreTrainedModel]) -> str | None:
        return get_own_attention_advice(kind, {_TYPE})

    def apart(self, model: nn.Module) -> list[nn.Module]:
        """Return the layers: their outputs have the prompt's tokens, too."""
        return [module for module in model.modules() if self.matches(model) and hasattr(module, "self_att")]

    def install(self, adapter: ModelAdapter) -> None:
        if not self.matches(adapter.model):
            return
        adapter.session.needs.number_tokens = _number
        config = adapter.model.config
        for module in adapter.model.modules():
            if hasattr(module, "prompt_length"):
                adapter.apply(wrap_model_forward(module, adapter.call), prompted=module)
            elif hasattr(module, "project_q"):
                adapter.apply(around_attention(module, config), attends_to_prompt=module)

    def refuse_generation(self, model: PreTrainedModel) -> str | None:
        return "expected tokens without a prompt of the model's own, got one" if self.matches(model) else None


def _number(prepared: Batch) -> Tensor:
    """Return the positions [B, T] of a whole batch.

    Raises:
        RingPatternError: documents, or padding, for which the model takes tokens off the front.
    """
    ids_BT, documents = prepared["input_ids"], prepared.get(DOCUMENT_IDS)
    several = documents is not None and bool((documents != documents[..., :1]).any())
    _refuse_parts(several or bool((ids_BT == 0).any()))
    return torch.arange(ids_BT.shape[1], device=ids_BT.device).expand(ids_BT.shape)


def _refuse_parts(has_parts: bool) -> None:
    if has_parts:
        expected, got = "samples of one document after the one prompt", "documents, or padding (id 0)"
        raise RingPatternError.wrong("CPM-Ant", expected, got, "give samples of one length")


def wrap_model_forward(model: Any, call: ModelCall) -> Callable[..., Any]:
    """Return what runs in place of the forward of a model with a prompt."""

    @_model_patch
    def around(
        forward: Callable[..., Any], input_ids: Tensor, output_attentions: bool | None = None,
        output_hidden_states: bool | None = None, *args: Any, **kwargs: Any,
    ) -> Any:  # fmt: skip
        if model.config._attn_implementation != NAME:  # engine.ring.off()
            return forward(input_ids, output_attentions, output_hidden_states, *args, **kwargs)
        name, sharding = type(model).__name__, call.get_sharding(model)
        if torch.compiler.is_compiling():
            raise not_compiled(name, "puts a prompt in front of the tokens")
        if output_attentions or output_hidden_states:
            raise RingConfigError.wrong(name, "logits alone", "the outputs of layers", "leave these out")
        rank = sharding.mesh.ring_rank
        of_padding = input_ids[:, : sharding.layout.valid_tokens(rank)] == 0
        _refuse_parts(bool(of_padding.any()))
        prompt = model.prompt_length if rank == 0 else 0
        first = 2 * model.prompt_length + model.vocab_size
        ids = torch.arange(first, first + prompt, device=input_ids.device, dtype=input_ids.dtype)
        segments = torch.full_like(input_ids, _OF_TOKENS)
        segments = pad(segments, (prompt, 0), value=_OF_PROMPT)
        ids_BL = torch.cat([ids.expand(len(input_ids), -1), input_ids], dim=1)
        states_BLE = model.input_embedding(ids_BL) + model.segment_embedding(segments)
        bias = _make_bias(model, sharding, prompt, input_ids.shape[1])
        states_BLE, _, _ = model.encoder(states_BLE, None, bias, False, False, None, False)
        return BaseModelOutputWithPast(last_hidden_state=states_BLE[:, prompt:])

    return around


def _make_bias(model: Any, sharding: BatchSharding, prompt: int, slots: int) -> PromptBias:
    """Return the bias of a call, in numbers that the model's own module gives for pairs."""
    table, device = model.position_bias, next(model.parameters()).device
    farthest = max(sharding.layout.tokens, model.prompt_length)

    def compute_pairs(queries: int, keys: int, of_queries: int, of_keys: int) -> Tensor:
        positions = [torch.zeros(1, n, dtype=torch.int64, device=device) for n in (keys, queries)]
        segments = [
            places + segment for places, segment in zip(positions, (of_keys, of_queries), strict=True)
        ]
        found_1HQK: Tensor = table(*positions, *segments)
        return found_1HQK[0].flatten(1)

    later_HR = compute_pairs(1, farthest, _OF_TOKENS, _OF_TOKENS)  # keys at and after the query: 0, -1, ..
    earlier_HR = compute_pairs(farthest, 1, _OF_TOKENS, _OF_TOKENS)
    profiles_HR = torch.cat([later_HR.flip(-1), earlier_HR[:, 1:]], dim=-1)
    crossing_HL = torch.cat(
        [
            compute_pairs(1, 1, _OF_PROMPT, _OF_TOKENS).expand(-1, prompt),
            compute_pairs(1, 1, _OF_TOKENS, _OF_PROMPT).expand(-1, slots),
        ],
        dim=-1,
    )
    return PromptBias(sharding, model.prompt_length, profiles_HR[:, None], 1 - farthest, crossing_HL)


def around_attention(module: Any, config: Any) -> Callable[..., Any]:
    """Return what runs in place of the forward of an attention module."""

    @_attention_patch
    def around(
        forward: Callable[..., Any], hidden_q: Tensor, hidden_kv: Tensor, attention_mask: Any,
        position_bias: Any, *args: Any, **kwargs: Any,
    ) -> Any:  # fmt: skip
        if config._attn_implementation != NAME:
            return forward(hidden_q, hidden_kv, attention_mask, position_bias, *args, **kwargs)
        name = type(module).__name__
        dropout = module.dropout.p if module.training and module.dropout is not None else 0.0
        check_attention_call(name, None, dropout, {})
        seen = choose_layer_pattern(module, position_bias.sharding, Full())
        if seen != Full():
            raise RingPatternError.wrong(name, "all pairs", str(seen), "leave the pattern to the model")
        q, k, v = (
            proj(x).unflatten(-1, (module.num_heads, -1)).transpose(1, 2)
            for proj, x in (
                (module.project_q, hidden_q), (module.project_k, hidden_kv), (module.project_v, hidden_kv),
            )
        )  # fmt: skip
        out_BHLD = position_bias.attend(q, k, v, module.dim_head**-0.5)
        return module.attention_out(out_BHLD.transpose(1, 2).flatten(2)), None

    return around
