"""Install the ring on a transformers model, and take it off again.

`ModelAdapter.install` applies the rows of model.py's table that the adapter's features need, and asks each
variant of attention to install itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ds_ring.data.loss import shared_scale
from ds_ring.data.session import RingSession
from ds_ring.models.attention_name import NAME
from ds_ring.models.families import (
    LossGuard,
    check_pooled_token,
    find_lookup_guards,
    make_pooling_hooks,
    pools_the_last_token,
    router_loss,
)
from ds_ring.models.model import CONFIG, MODEL
from ds_ring.models.model_call import ModelCall
from ds_ring.models.model_part import ModelPart, make_model_parts
from ds_ring.models.positions import (
    check_lengths,
    counts_real_tokens,
    depends_on_length,
    find_numbering,
    make_numbering_check,
    make_rotary_hooks,
)
from ds_ring.models.variants import own_attention, variants
from ds_ring.patches import AppliedPatch, applied, apply, patch, paused

_guards_loss = patch(
    MODEL, "loss_function", stage="around_loss", kind="replaced", feature="loss guard",
    reason="calls the function before it; refuses a mean over local tokens and labels that are not shifted",
)  # fmt: skip
_own_attention = patch(
    CONFIG, "_attn_implementation", stage="around_off", kind="set", feature="attention.off",
    reason="engine.ring.off(): the model's own attention; its hooks are removed meanwhile",
)  # fmt: skip
_off_patch = partial(patch, stage="around_off", kind="set", reason="engine.ring.off()")
_own_loss = _off_patch(MODEL, "loss_function", feature="loss guard.off")


def get_own_implementation(part: PreTrainedModel) -> str:
    """Return the attention that a model has without a ring."""
    named: str = part.config._attn_implementation
    if named != NAME:
        return named
    return "sdpa" if part._supports_sdpa else "eager"


def set_implementations(attention_of: dict[PreTrainedModel, str], session: RingSession | None = None) -> None:
    """Set every model's attention: outer models first, since a configuration hands it down."""
    for part, name in attention_of.items():
        apply(_own_attention.to(name), session=session, config=part.config)


@dataclass(eq=False)
class ModelAdapter:
    """Own the patches of one transformers model that runs on a ring.

    Attributes:
        model: the outermost transformers model.
        rewritten: torch.compile's backend "ds_ring" replaces the attention in the graph. The position ids
            then pass through an operator that raises when it runs; the backend removes it. The backend checks
            the masks, too.
        implementations: the attention that each model inside has without a ring, outermost first.
        changes: the applied patches; `off` pauses their hooks.
        call: handles the calls of the model, from `install` on.
        parts: what capabilities add to the model.
    """

    model: PreTrainedModel
    session: RingSession
    rewritten: bool
    implementations: dict[PreTrainedModel, str]
    changes: list[AppliedPatch] = field(default_factory=list)
    call: ModelCall = field(init=False)
    parts: list[ModelPart] = field(default_factory=list)

    def apply(self, *replacements: Any, **objects: Any) -> None:
        """Apply the rows of replacements to objects in the model: `adapter.apply`."""
        self.changes += apply(*replacements, session=self.session, **objects)

    def gather_once(self, module: nn.Module) -> None:
        """Let ZeRO 3 gather a module's weights as a whole: ranks call modules inside it unequally often."""
        self.session.needs.gathered_once.append(module)

    @contextmanager
    def off(self) -> Iterator[None]:
        """Restore the model's own attention and loss inside the context, without our hooks."""
        model, on = self.model, {part: part.config._attn_implementation for part in self.implementations}
        replacements = [_own_loss.to(model.loss_function.loss_function)]
        replacements += [replacement for part in self.parts for replacement in part.own()]
        with applied(*replacements, model=model, generator=model):
            set_implementations(self.implementations, self.session)
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
        self.parts = make_model_parts(model, session, lambda: self.rewritten)
        for part in self.parts:
            part.install()
        check_lengths(model)
        self._install_on_model(self.parts)
        for module in model.modules():
            if depends_on_length(module):
                self.apply(*make_rotary_hooks(module, session.batches), part=module)
        for variant in variants():
            variant.install(self)
        session.needs.number_tokens = find_numbering(model) or session.needs.number_tokens
        session.needs.skips_padding = session.needs.skips_padding or counts_real_tokens(model)
        if pools_the_last_token(model):
            session.needs.slots = session.needs.real_tokens = True
            session.needs.check = partial(check_pooled_token, model)
        for module, guard in find_lookup_guards(model, session):
            self.apply(guard, lookup=module)

    def _install_on_model(self, parts: list[ModelPart]) -> None:
        """Apply the rows of the model itself, of its head and of its loss."""
        model, session = self.model, self.session
        pools, loss = pools_the_last_token(model), model.loss_function
        for part in parts:
            loss = part.loss_function(loss)
        scale = shared_scale(session.run_mesh, session.gradient_divisor) if pools else None
        guard = LossGuard(loss, scale)
        kind = next(filter(None, (variant.model_call(model) for variant in variants())), ModelCall)
        self.call = kind(self, guard)
        # Image encoders number patches of their own.
        known = self.call.one_sequence and not own_attention(model)
        numbering = make_numbering_check(model, session.run_mesh) if known else None
        patches = [
            *(replacement for part in parts for replacement in part.patches(loss)),
            _guards_loss.to(guard),
            *([] if numbering is None else numbering.model),
            router_loss(model, guard, session),
            *(make_pooling_hooks(model, session) if pools else []),
            *self.call.hooks(),
        ]
        self.apply(
            *(replacement for replacement in patches if replacement is not None),
            model=model, base=model.base_model, head=model.get_output_embeddings(), generator=model,
            score=getattr(model, "score", None),
        )  # fmt: skip
        if numbering is not None:
            numbering.changes += [
                replacement for replacement in self.changes if replacement.row.feature == "numbering"
            ]
            self._check_numbering(numbering.part, numbering.changes)

    def _check_numbering(self, hook: Callable[..., None], changes: list[AppliedPatch]) -> None:
        """Let modules that take position_ids compare theirs with the model's, in the first forward pass."""
        positioned = set()
        if not self.rewritten:
            for variant in variants():
                positioned |= set(map(id, variant.positioned(self.model)))
        for module in self.model.modules():
            takes_positions = "position_ids" in inspect.signature(module.forward).parameters
            if takes_positions and module is not self.model and id(module) not in positioned:
                self.apply(hook, part=module)
                changes.append(self.changes[-1])
