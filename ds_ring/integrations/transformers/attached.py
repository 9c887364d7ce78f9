"""Attach a transformers model to a ring, and detach it again.

`Attached.put_on` collects what the features provide and applies the rows of model.py's table, in its order.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from deepspeed.utils import set_z3_leaf_module
from torch import Tensor, nn
from transformers import PreTrainedModel

from ds_ring.errors import RingPatternError
from ds_ring.integrations.adapter import AppliedPatch, paused
from ds_ring.integrations.compile.graph_sharding import needs_backend_op
from ds_ring.integrations.deepspeed.batch import SHARDING
from ds_ring.integrations.deepspeed.loss import shared_scale
from ds_ring.integrations.deepspeed.session import RingSession
from ds_ring.integrations.transformers import checks
from ds_ring.integrations.transformers.attention_name import NAME
from ds_ring.integrations.transformers.compressed import (
    CompressedEntries,
    compresses,
    compressors_of,
)
from ds_ring.integrations.transformers.encoder_decoders import (
    PairCall,
    decoder_ids_of,
    encoder_hook,
    is_pair,
)
from ds_ring.integrations.transformers.families import (
    LossGuard,
    check_outputs,
    pooled_token,
    pools_the_last_token,
    router_loss,
)
from ds_ring.integrations.transformers.generation import Generation, generation_feature
from ds_ring.integrations.transformers.images import image_encoders, images_feature
from ds_ring.integrations.transformers.indexed import (
    BlockIndexedLayer,
    IndexedLayer,
    chosen_mask,
    selects_blocks,
    selects_keys,
)
from ds_ring.integrations.transformers.latents import latent_layers
from ds_ring.integrations.transformers.layer_masks import narrowest_beside, patterns_of_layers
from ds_ring.integrations.transformers.long_sequence import offloaded_checkpoints, tiled_head, tiled_layers
from ds_ring.integrations.transformers.model import TABLE
from ds_ring.integrations.transformers.neftune import scale_noise
from ds_ring.integrations.transformers.positions import (
    NumberingCheck,
    QueryScale,
    check_lengths,
    depends_on_length,
    numbering_check,
    numbering_of,
    rotary_length,
)
from ds_ring.integrations.transformers.recurrent_parts import (
    is_recurrent,
    own_modules,
    told_sharding,
    wrap_functions,
)
from ds_ring.integrations.transformers.score_terms import KeyTerms, around_bias
from ds_ring.integrations.transformers.written_out import (
    Family,
    around_attention,
    around_positions,
    check_inputs,
    family_of,
    layers_of,
    parts_of,
    told_layer,
)

REWRITTEN = "rewritten by the backend"  # in place of a sharding: the graph asks for it


def own_implementation(part: PreTrainedModel) -> str:
    """Return the attention that a model has without a ring."""
    named: str = part.config._attn_implementation
    if named != NAME:
        return named
    return "sdpa" if part._supports_sdpa else "eager"


def set_implementations(attention_of: dict[PreTrainedModel, str], session: RingSession | None = None) -> None:
    """Set every model's attention: outer models first, since a configuration hands it down."""
    for part, name in attention_of.items():
        off = {"attention.off": SimpleNamespace(around_off=name)}
        TABLE.apply(off, session, config=part.config)


@dataclass(eq=False)
class Attached:
    """A transformers model that is attached to a ring."""

    model: PreTrainedModel  # the outermost transformers model
    session: RingSession
    # True: torch.compile's backend="ds_ring" replaces the attention in the graph. The position ids then pass
    # through an operator that raises when it runs; the backend removes it. The masks are checked where the
    # backend reads them.
    rewritten: bool
    own: dict[PreTrainedModel, str]  # own attention of each model inside, outermost first
    changes: list[AppliedPatch] = field(default_factory=list)  # of model.py's table
    position_ids: Tensor | None = None  # of the call under way, for a model that would number its own tokens

    @contextmanager
    def off(self) -> Iterator[None]:
        """Restore the model's own attention and loss inside the context, without our hooks."""
        model, on = self.model, {part: part.config._attn_implementation for part in self.own}
        generate = getattr(model, "generate", None)
        features: dict[str, Any] = {
            "loss guard.off": SimpleNamespace(around_off=model.loss_function.loss_function)
        }
        if generate is not None:
            features["generation.off"] = SimpleNamespace(around_off=generate.own)
        with TABLE.applied(features, model=model, generator=model):
            set_implementations(self.own, self.session)
            try:
                with paused(self.changes):
                    yield
            finally:
                set_implementations(on, self.session)

    def put_on(self) -> None:
        """Apply model.py's table to the model: the sharding, checks, and what its family needs.

        Raises:
            RingConfigError: the model needs something that a ring cannot give it.
        """
        model, session, needs = self.model, self.session, self.session.needs
        for module, forward in tiled_layers(model, session).items():
            TABLE.apply({"tiled layers": SimpleNamespace(around_forward=forward)}, session, layer=module)
        latents = {} if self.rewritten else latent_layers(model, session)
        for module, unexpanded in latents.items():
            expand = {"latents": SimpleNamespace(around_forward=unexpanded)}
            self.changes += TABLE.apply(expand, session, latent=module)
        head, pools = tiled_head(model, session), pools_the_last_token(model)
        tiled = None if head is None else head.feature(model, session)
        scale = shared_scale(session.mesh, session.gradient_divisor) if pools else None
        guard = LossGuard(model.loss_function if tiled is None else tiled.around_loss, scale)
        generation = Generation(model, session)
        pair = PairCall(model, session) if is_pair(model) else None
        # Image encoders number patches of their own; of encoder-decoders the ring knows the positions.
        unknown = not image_encoders(model) and pair is None
        numbering = numbering_check(model, session.mesh) if unknown else None
        check_lengths(model)
        features = {
            "tiled loss": tiled,
            "loss guard": SimpleNamespace(around_loss=guard),
            "generation": generation_feature(generation, lambda: self.rewritten),
            "offloaded checkpoints": offloaded_checkpoints(model, session),
            "numbering": None if numbering is None else numbering.model,
            "images": images_feature(model, session),
            "router loss": router_loss(model, guard, session),
            "pooled token": pooled_token(model, session) if pools else None,
            "sharding": pair or self._sharding(guard, generation),
        }
        objects = {"model": model, "base": model.base_model, "head": model.get_output_embeddings()}
        objects |= {"generator": model} if hasattr(model, "generate") else {}
        objects |= {"score": model.score} if pools else {}
        self.changes += TABLE.apply(
            {name: one for name, one in features.items() if one is not None}, session, **objects
        )
        if numbering is not None:
            numbering.changes += [one for one in self.changes if one.row.feature == "numbering"]
        wrap_functions(model)
        parts = [] if self.rewritten else parts_of(model)
        # Of these the ring knows the positions.
        replaced = {id(module) for _, _, module in parts}
        replaced |= {id(module) for one in compressors_of(model) for module in one.modules()}
        for module in model.modules():
            self.changes += self._put_on_part(module, None if id(module) in replaced else numbering)
        self._put_on_written_out(parts, pair)
        if pair is not None:
            needs.decoder_ids = decoder_ids_of(model)
            hook = {"two sequences": encoder_hook()}
            self.changes += TABLE.apply(hook, session, encoder=model.get_encoder())
        needs.number_tokens = numbering_of(model) or needs.number_tokens
        needs.slots = needs.slots or pools
        needs.block = math.lcm(needs.block, *(one.compress_rate for one in compressors_of(model)))

    def _put_on_written_out(
        self, parts: list[tuple[PreTrainedModel, Family, nn.Module]], pair: PairCall | None
    ) -> None:
        """Apply the rows of modules that write attention out, or number tokens."""
        batches = self.session.batches
        encoder = {id(one) for one in self.model.get_encoder().modules()} if pair is not None else set()
        for part, family, module in parts:
            if type(module).__name__ == family.positions:
                own = None if pair is None else pair.positions(id(module) in encoder)
                numbers = around_positions(part, family, module, own or (lambda: self.position_ids))
                TABLE.apply({"own positions": numbers}, self.session, numbers=module)
            else:
                around = around_attention(part, family, module, batches, id(module) in encoder)
                TABLE.apply({"written out": around}, self.session, written=module)
        for layer in () if self.rewritten else layers_of(self.model):
            told = told_layer(batches, id(layer) in encoder)
            self.changes += TABLE.apply({"written out.layer": told}, self.session, checkpointed=layer)

    def _put_on_part(self, module: nn.Module, numbering: NumberingCheck | None) -> list[AppliedPatch]:
        """Apply the rows of a module inside the model."""
        takes_positions = "position_ids" in inspect.signature(module.forward).parameters
        changes: list[AppliedPatch] = []
        if numbering is not None and module is not self.model and takes_positions:
            changes = TABLE.apply({"numbering.part": numbering.part}, self.session, part=module)
            numbering.changes += changes
        if is_recurrent(module):
            told = {"recurrence": told_sharding(self.session)}
            changes += TABLE.apply(told, self.session, recurrent=module)
        # The wrappers of these call modules inside them as often as the batch asks, which differs by rank.
        # As a leaf of ZeRO 3 the part gathers their weights once.
        # Qwen 4's n-gram embedding itself takes whole numbers, with which a leaf's backward pass fails.
        if type(module).__name__ in ("ZayaCCAProjection", "Qwen4ExpTextPLELayer"):
            set_z3_leaf_module(module, True)
        for child, (target, wrapper) in own_modules(module).items():
            own = {f"recurrence.{target}": SimpleNamespace(around_call=wrapper)}
            changes += TABLE.apply(own, self.session, **{target: child})
        if depends_on_length(module):
            rotary = rotary_length(module, self.session.batches)
            changes += TABLE.apply({"rotary length": rotary}, self.session, part=module)
        if compresses(module):
            entries = CompressedEntries(module)
            compressor: Any = module.compressor
            hook = SimpleNamespace(before_forward=entries.note, around_forward=entries)
            objects = {"compressing": module, "compressor": compressor}
            changes += TABLE.apply({"compressed entries": hook}, self.session, **objects)
            if hasattr(compressor, "indexer"):
                scorer = compressor.indexer.scorer
                select = {"compressed entries.scorer": SimpleNamespace(around_forward=entries.select)}
                changes += TABLE.apply(select, self.session, scorer=scorer)
                set_z3_leaf_module(scorer, True)  # ranks call it another number of times
        if selects_keys(module):
            indexed = IndexedLayer(module)
            changes += TABLE.apply({"chosen keys": indexed.layer}, self.session, indexed=module)
            changes += TABLE.apply({"chosen keys": indexed.indexer}, self.session, indexer=module.indexer)
        if selects_blocks(module) and not self.rewritten:
            blocks = BlockIndexedLayer(module)
            changes += TABLE.apply({"chosen blocks": blocks.layer}, self.session, indexed=module)
            changes += TABLE.apply({"chosen blocks": blocks.indexer}, self.session, indexer=module.indexer)
        if hasattr(module, "build_attention_mask_from_topk") and not self.rewritten:
            mask = {"chosen blocks.mask": SimpleNamespace(around_forward=chosen_mask)}
            TABLE.apply(mask, self.session, masking=module)
        is_biased = hasattr(module, "has_relative_attention_bias") and hasattr(module, "compute_bias")
        if is_biased and not self.rewritten:  # as T5's; adds a bias or zeros in its place
            bias = {
                "relative bias": SimpleNamespace(around_forward=around_bias(module)),
                "relative bias.on": SimpleNamespace(around_forward=True),
            }
            TABLE.apply(bias, self.session, biased=module)
        has_terms = hasattr(module, "prepare_dynamic_mask") and hasattr(module, "dt_proj")
        if has_terms and not self.rewritten:  # a learned term of each key, as Doge's
            terms = {"key terms": SimpleNamespace(around_forward=KeyTerms(module))}
            changes += TABLE.apply(terms, self.session, terms=module)
        if getattr(module, "attn_temperature_tuning", False) and not getattr(module, "use_rope", True):
            scale = QueryScale(module)
            changes += TABLE.apply({"query scale": scale}, self.session, scaling=module)
            queries = SimpleNamespace(after_forward=scale.scaled)
            changes += TABLE.apply({"query scale": queries}, self.session, q_proj=module.q_proj)
        return changes

    def _sharding(self, guard: LossGuard, generation: Generation) -> SimpleNamespace:
        """Return the hooks that pass the sharding of the batch in, and check the call and its output."""
        model, session = self.model, self.session
        said = patterns_of_layers(model, session.pattern.is_causal)
        session.needs.layers += said
        narrowest = 0 if session.config.pattern.layers else narrowest_beside(said, session.pattern)
        name, signature = type(model).__name__, inspect.signature(model.forward)
        is_known = not self.rewritten and family_of(model) is not None

        def before(
            _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            # The checks start anew with each call, because batches differ.
            if model.training and not torch.compiler.is_compiling():
                scale_noise(model, session)  # a Trainer switches it on and off
            check_inputs(model, kwargs)
            if generation.sharding is not None:
                guard.start()
                return args, kwargs | {SHARDING: generation.sharding}
            bound = signature.bind_partial(*args, **kwargs)
            given = dict(bound.arguments) | kwargs
            guard.start(given.get("num_items_in_batch"))
            checks.check_model_call(name, given)
            added: dict[str, Any] = {}
            if is_known:
                ids = given["inputs_embeds"] if given.get("input_ids") is None else given["input_ids"]
                self.position_ids = given["position_ids"].expand(
                    ids.shape[0], -1
                )  # XLM asks for each sample's
                added["position_ids"] = self.position_ids
            if "use_cache" not in given:
                added["use_cache"] = False  # transformers' default would keep every layer's keys and values
            if self.rewritten:
                added["position_ids"] = needs_backend_op(given["position_ids"])
                if model.config._attn_implementation == NAME:
                    added[SHARDING] = REWRITTEN
                return bound.args, bound.kwargs | added
            if not torch.compiler.is_compiling():  # in compiled code the engine's hook has selected the batch
                session.batches.select(x for x in given.values() if isinstance(x, Tensor))
            sharding = session.batches.current
            checks.check_length(name, given, sharding)
            if torch.compiler.is_compiling() and narrowest < sharding.layout.tokens:
                raise RingPatternError(
                    f"{name}: a layer of the model sees {narrowest} of {sharding.layout.tokens} tokens, which"
                    ' only engine.compile(backend="ds_ring") reads; use that, or do not compile'
                )
            return args, kwargs | added | {SHARDING: sharding}

        def after(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if generation.sharding is not None:
                generation.after(output)
                return
            check_outputs(model, output, session.batches.current.local_tokens)
            guard.check(model, output)

        return SimpleNamespace(before_forward=before, after_forward=after)
