"""Attach a transformers model to a ring, and detach it again.

Owns the hooks around a model's call: they pass the sharding of the batch in and check the output.
`attention.py` owns the attention function, `families.py` whatever else a model family needs.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from ds_ring.errors import RingPatternError
from ds_ring.integrations.compile.graph_sharding import needs_backend_op
from ds_ring.integrations.deepspeed.batch import SHARDING
from ds_ring.integrations.deepspeed.session import RingSession
from ds_ring.integrations.transformers import checks
from ds_ring.integrations.transformers.attention_name import NAME
from ds_ring.integrations.transformers.families import check_outputs, equip
from ds_ring.integrations.transformers.generation import allow_generation
from ds_ring.integrations.transformers.layer_masks import narrowest_beside, patterns_of_layers

REWRITTEN = "rewritten by the backend"  # in place of a sharding: the graph asks for it


def own_implementation(part: PreTrainedModel) -> str:
    """Return the attention that a model has without a ring."""
    named: str = part.config._attn_implementation
    if named != NAME:
        return named
    return "sdpa" if part._supports_sdpa else "eager"


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
    handles: list[RemovableHandle] = field(default_factory=list)

    @contextmanager
    def off(self) -> Iterator[None]:
        """Restore the model's own attention and loss inside the context, without our hooks."""
        on, guard = {part: part.config._attn_implementation for part in self.own}, self.model.loss_function
        self.model.loss_function = guard.loss_function
        generate = self.model.__dict__.pop("generate", None)
        _set_implementations(self.own)
        try:
            with _without(self.handles):
                yield
        finally:
            _set_implementations(on)
            self.model.loss_function = guard
            if generate is not None:
                self.model.__dict__["generate"] = generate

    def put_on(self) -> None:
        """Register the hooks of the model's calls: sharding, checks, and what its family needs."""
        model, session = self.model, self.session
        guard, self.handles = equip(model, session)
        generation, handle = allow_generation(model, session, lambda: self.rewritten)
        self.handles.append(handle)
        said = patterns_of_layers(model, session.pattern.is_causal)
        session.needs.layers += said
        narrowest = 0 if session.config.pattern.layers else narrowest_beside(said, session.pattern)
        name, signature = type(model).__name__, inspect.signature(model.forward)

        def before(
            _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            # The checks start anew with each call, because batches differ.
            if generation.sharding is not None:
                guard.start()
                return args, kwargs | {SHARDING: generation.sharding}
            bound = signature.bind_partial(*args, **kwargs)
            given = dict(bound.arguments) | kwargs
            guard.start(given.get("num_items_in_batch"))
            checks.check_model_call(name, given)
            added: dict[str, Any] = {}
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

        def after(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if generation.sharding is not None:
                generation.after(output)
                return
            check_outputs(model, output, session.batches.current.local_tokens)
            guard.check(model, output)

        self.handles.append(model.register_forward_pre_hook(before, with_kwargs=True))
        self.handles.append(model.register_forward_hook(after))


@contextmanager
def _without(handles: list[RemovableHandle]) -> Iterator[None]:
    """Remove hooks inside the context and restore their order: DeepSpeed's hooks must run after ours."""
    found = [(handle.hooks_dict_ref(), handle.id) for handle in handles]
    ours = [(hooks, key) for hooks, key in found if hooks is not None and key in hooks]
    before = [(hooks, dict(hooks)) for hooks in {id(hooks): hooks for hooks, _ in ours}.values()]
    for hooks, key in ours:
        del hooks[key]
    try:
        yield
    finally:
        for hooks, order in before:
            mine = {key for others, key in ours if others is hooks}
            now = dict(hooks)
            hooks.clear()
            hooks.update({key: hook for key, hook in order.items() if key in mine or key in now} | now)


def _set_implementations(attention_of: dict[PreTrainedModel, str]) -> None:
    """Name every model's attention: outer models first, since a configuration hands it down."""
    for part, name in attention_of.items():
        part.config._attn_implementation = name
