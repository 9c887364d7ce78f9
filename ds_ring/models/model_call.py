"""One call of a transformers model on a ring: its arguments and its output are checked.

A variant may handle the calls of its models by a subclass.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ds_ring.data.batch import SHARDING
from ds_ring.data.batch_sharding import BatchSharding
from ds_ring.errors import RingPatternError
from ds_ring.models import checks
from ds_ring.models.attention_name import NAME
from ds_ring.models.backend_mark import needs_backend_op
from ds_ring.models.families import LossGuard, check_outputs
from ds_ring.models.layer_masks import LayerMask, find_narrowest_layer, read_layer_patterns
from ds_ring.models.model import MODEL
from ds_ring.models.neftune import scale_noise
from ds_ring.patches import patch

if TYPE_CHECKING:
    from ds_ring.models.model_adapter import ModelAdapter

log = logging.getLogger(__name__)
_before_call = patch(
    MODEL, stage="before_forward", feature="sharding",
    reason="checks the call, passes use_cache=False and the batch's sharding",
)  # fmt: skip
_after_call = patch(MODEL, stage="after_forward", feature="sharding", reason="checks the output and its loss")
REWRITTEN = "rewritten by the backend"  # in place of a sharding: the graph asks for it


@lru_cache(maxsize=1)  # once a process
def _note_unused_cache() -> None:
    log.warning("ds_ring: use_cache=True: in training nothing reads a cache, and none is made")


class ModelCall:
    """Give a model the sharding of its batch, and check its arguments and its output.

    Attributes:
        one_sequence: whether the model is given one sequence, whose position_ids all of its modules use.
    """

    one_sequence = True

    def __init__(self, adapter: ModelAdapter, guard: LossGuard) -> None:
        self.adapter, self.model, self.session = adapter, adapter.model, adapter.session
        self.guard, self._warned, self._warned_of_keys = guard, False, False
        configs = {id(part.config): part.config for part in adapter.implementations}
        self._on_ring = [config for config in configs.values() if config._attn_implementation == NAME]
        self.name, self.signature = type(self.model).__name__, inspect.signature(self.model.forward)
        if type(self).before is ModelCall.before and not checks.takes_more(self.signature):
            raise checks.cannot_run(self.model, checks.TAKES_NO_MORE)
        self.start()

    def start(self) -> None:
        """Give the choice of the layout the patterns of the model's layers."""
        session = self.session
        layers = read_layer_patterns(self.model, session.pattern.is_causal)
        session.needs.layers += layers
        self._narrowest = (
            0 if session.config.pattern.layers else find_narrowest_layer(layers, session.pattern)
        )

    def hooks(self) -> list[Callable[..., Any]]:
        """Return the hooks of the model."""
        # Functions: a copy of the model would copy bound methods, and with them all that they hold.

        @_before_call
        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if not torch.compiler.is_compiling():
                for config in self._on_ring:
                    checks.check_attention(self.name, config._attn_implementation)
            return self.before(module, args, kwargs)

        @_after_call
        def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            self.after(module, args, kwargs, output)

        return [before, after]

    def before(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Check the arguments, and add the sharding of the batch."""
        # The checks start anew with each call, because batches differ.
        model, session = self.model, self.session
        if model.training and not torch.compiler.is_compiling():
            scale_noise(model, session)  # a Trainer switches it on and off
            if not self._warned and checks.loses_gradients(model):
                self._warned = True
                log.warning("%s: %s", self.name, checks.LOST_GRADIENTS)
        for part in self.adapter.parts:
            if part.sharding is not None:
                self.guard.start()
                return args, kwargs | {SHARDING: part.sharding}
        bound = self.signature.bind_partial(*args, **kwargs)
        arguments = dict(bound.arguments) | kwargs
        self.guard.start(arguments.get("num_items_in_batch"), arguments.get("shift_labels"))
        if any(arguments.get("attention_mask") is mask for mask in session.batches.masks):
            del arguments["attention_mask"]  # of a user's class around the models that attend
        added: dict[str, Any] = {}
        if "use_cache" not in arguments:
            added["use_cache"] = False  # transformers' default would keep every layer's keys and values
        elif arguments["use_cache"] and "use_cache" in kwargs and model.training and torch.is_grad_enabled():
            arguments["use_cache"] = added["use_cache"] = False
            _note_unused_cache()
        of_config = {"output_attentions": getattr(model.config, "output_attentions", False)}
        checks.check_model_call(self.name, of_config | {k: x for k, x in arguments.items() if x is not None})
        if self.adapter.rewritten:
            added["position_ids"] = needs_backend_op(arguments["position_ids"])
            if model.config._attn_implementation == NAME:
                added[SHARDING] = REWRITTEN
            return bound.args, bound.kwargs | added
        if not torch.compiler.is_compiling():  # in compiled code the engine's hook has selected the batch
            session.batches.select(x for x in arguments.values() if isinstance(x, Tensor))
        sharding = session.batches.current
        checks.check_length(self.name, arguments, sharding)
        if not (self._warned_of_keys or torch.compiler.is_compiling()):
            unread = checks.list_unread_keys(self.signature, kwargs, sharding)
            if unread and any(config._attn_implementation == NAME for config in self._on_ring):
                self._warned_of_keys = True
                log.warning(f"%s: {checks.UNREAD_KEYS}", self.name, ", ".join(unread))
        if torch.compiler.is_compiling() and self._narrowest < sharding.layout.tokens:
            raise RingPatternError(
                f"{self.name}: a layer sees {self._narrowest} of {sharding.layout.tokens} tokens, which only"
                ' engine.compile(backend="ds_ring") reads; use that, or do not compile'
            )
        return args, kwargs | added | {SHARDING: sharding}

    def after(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Check the output and its loss."""
        for part in self.adapter.parts:
            if part.sharding is not None:
                part.after(output)
                return
        check_outputs(self.model, output, self.session.batches.current.local_tokens)
        self.guard.check(self.model, output)

    # For variants, while the model runs.

    def get_sharding(self, module: nn.Module) -> BatchSharding:
        """Return the sharding of the sequence that a module of the model works on."""
        return self.session.batches.current

    def get_mask(self, module: nn.Module) -> LayerMask | None:
        """Return what a layer attends to that was given no mask; None if that is an error."""
        return None

    def position_ids(self, module: nn.Module) -> Tensor | None:
        """Return the positions of the tokens that a module gets; None if they are those of the model."""
        return None
