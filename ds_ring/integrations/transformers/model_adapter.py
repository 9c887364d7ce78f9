"""Install the ring on a transformers model, and take it off again.

`ModelAdapter.install` applies the rows of model.py's table that the adapter's features need, and asks each
variant of attention to install itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from deepspeed.utils import set_z3_leaf_module
from torch import nn
from transformers import PreTrainedModel

from ds_ring.integrations.adapter import AppliedPatch, apply, paused
from ds_ring.integrations.deepspeed.loss import shared_scale
from ds_ring.integrations.deepspeed.session import RingSession
from ds_ring.integrations.transformers.attention_name import NAME
from ds_ring.integrations.transformers.families import (
    LossGuard,
    pooled_token,
    pools_the_last_token,
    router_loss,
)
from ds_ring.integrations.transformers.generation import Generation, generation_feature
from ds_ring.integrations.transformers.images import image_encoders, images_feature
from ds_ring.integrations.transformers.long_sequence import offloaded_checkpoints, tiled_head, tiled_layers
from ds_ring.integrations.transformers.model import TABLE
from ds_ring.integrations.transformers.model_call import ModelCall
from ds_ring.integrations.transformers.positions import (
    check_lengths,
    depends_on_length,
    numbering_check,
    numbering_of,
    rotary_length,
)
from ds_ring.integrations.transformers.variants import variants


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
class ModelAdapter:
    """Own the patches of one transformers model that runs on a ring.

    Attributes:
        model: the outermost transformers model.
        rewritten: torch.compile's backend "ds_ring" replaces the attention in the graph. The position ids
            then pass through an operator that raises when it runs; the backend removes it. The backend checks
            the masks, too.
        own: the attention that each model inside has without a ring, outermost first.
        changes: the applied patches; `off` pauses their hooks.
        call: handles the calls of the model, from `install` on.
    """

    model: PreTrainedModel
    session: RingSession
    rewritten: bool
    own: dict[PreTrainedModel, str]
    changes: list[AppliedPatch] = field(default_factory=list)
    call: ModelCall = field(init=False)

    def apply(self, *replacements: Any, **objects: Any) -> None:
        """Apply the rows of replacements to objects in the model: `adapter.apply`."""
        self.changes += apply(*replacements, session=self.session, **objects)

    def gather_once(self, module: nn.Module) -> None:
        """Let ZeRO 3 gather a module's weights as a whole: ranks call modules inside it unequally often."""
        set_z3_leaf_module(module, True)

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

    def install(self) -> None:
        """Apply all patches to the model.

        Raises:
            RingConfigError: the model needs something that a ring cannot give it.
        """
        model, session = self.model, self.session
        for module, forward in tiled_layers(model, session).items():
            TABLE.apply({"tiled layers": SimpleNamespace(around_forward=forward)}, session, layer=module)
        check_lengths(model)
        self._install_on_model()
        for module in model.modules():
            if depends_on_length(module):
                rotary = {"rotary length": rotary_length(module, session.batches)}
                self.changes += TABLE.apply(rotary, session, part=module)
        for variant in variants():
            variant.install(self)
        session.needs.number_tokens = numbering_of(model) or session.needs.number_tokens
        session.needs.slots = session.needs.slots or pools_the_last_token(model)

    def _install_on_model(self) -> None:
        """Apply the rows of the model itself, of its head and of its loss."""
        model, session = self.model, self.session
        head, pools = tiled_head(model, session), pools_the_last_token(model)
        tiled = None if head is None else head.feature(model, session)
        scale = shared_scale(session.mesh, session.gradient_divisor) if pools else None
        guard = LossGuard(model.loss_function if tiled is None else tiled.around_loss, scale)
        generation = Generation(model, session)
        kind = next(filter(None, (variant.model_call(model) for variant in variants())), ModelCall)
        self.call = kind(self, guard, generation)
        # Image encoders number patches of their own.
        known = self.call.one_sequence and not image_encoders(model)
        numbering = numbering_check(model, session.mesh) if known else None
        features = {
            "tiled loss": tiled,
            "loss guard": SimpleNamespace(around_loss=guard),
            "generation": generation_feature(generation, lambda: self.rewritten),
            "offloaded checkpoints": offloaded_checkpoints(model, session),
            "numbering": None if numbering is None else numbering.model,
            "images": images_feature(model, session),
            "router loss": router_loss(model, guard, session),
            "pooled token": pooled_token(model, session) if pools else None,
            "sharding": SimpleNamespace(**self.call.hooks()),
        }
        objects = {"model": model, "base": model.base_model, "head": model.get_output_embeddings()}
        objects |= {"generator": model} if hasattr(model, "generate") else {}
        objects |= {"score": model.score} if pools else {}
        self.changes += TABLE.apply(
            {name: one for name, one in features.items() if one is not None}, session, **objects
        )
        if numbering is not None:
            numbering.changes += [one for one in self.changes if one.row.feature == "numbering"]
            self._check_numbering(numbering.part, numbering.changes)

    def _check_numbering(self, hook: SimpleNamespace, changes: list[AppliedPatch]) -> None:
        """Let modules that take position_ids compare theirs with the model's, in the first forward pass."""
        positioned = set()
        if not self.rewritten:
            for variant in variants():
                positioned |= set(map(id, variant.positioned(self.model)))
        for module in self.model.modules():
            takes_positions = "position_ids" in inspect.signature(module.forward).parameters
            if takes_positions and module is not self.model and id(module) not in positioned:
                applied = TABLE.apply({"numbering.part": hook}, self.session, part=module)
                changes += applied
                self.changes += applied
