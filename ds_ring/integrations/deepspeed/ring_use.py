"""Check in the first forward pass that a model uses the ring.

A module of one's own that calls plain `scaled_dot_product_attention` would attend to this rank's tokens only
and train on something else without a word. Owns how that is noticed: no ring pass has run in a forward pass
that needs one, or plain attention over exactly this rank's tokens was called in it. What a transformers model
may ask for is checks.py's.

Every rank of a sequence runs the same model on the same sharding, so all of them raise.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ds_ring.errors import RingConfigError
from ds_ring.integrations.deepspeed.batch_sharding import BatchSharding
from ds_ring.integrations.deepspeed.session import RingSession
from ds_ring.masks.catalog import Causal
from ds_ring.runtime.context import forward_passes

_WHAT_TO_DO = (
    'say engine.compile(backend="ds_ring") before the first batch (it rewrites scaled_dot_product_attention),'
    " call engine.ring.attention()(q, k, v) or ds_ring.RingAttention in the module, or use a transformers"
    ' model, which gets the ring\'s attention by itself unless the section says "attention": "as_is"'
)
_TRAINS_OFF = (
    "engine.ring.off(): expected a forward pass that evaluates, got one in training mode with gradients: each"
    " rank would train on its own tokens only; leave the block first, or call engine.eval()"
)
_PLAIN = "scaled_dot_product_attention", "flex_attention"
_SOFTMAX = "softmax", "_softmax"
_MULTIHEAD = "multi_head_attention_forward"  # of nn.MultiheadAttention; what it calls is not seen


class RingUse:
    """Check the first forward passes of an engine's model.

    Args:
        session: knows where the batch in the model lies.
        engine: whose model is checked, in its first forward pass of each mode (training, evaluation). The
            graph of a compiled model is not examined: the backend has read it.
    """

    def __init__(self, session: RingSession, engine: Any) -> None:
        self._session = session
        self._engine = engine
        self._seen: set[bool] = set()

    def around_forward(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Check the first calls that need a ring."""
        training = bool(self._engine.module.training)
        if self._session.batches.is_off:
            if training and torch.is_grad_enabled():
                raise RingConfigError(_TRAINS_OFF)
            return forward(*args, **kwargs)
        if training in self._seen:
            return forward(*args, **kwargs)
        sharding = self._session.batches.current
        is_alone = sharding.mesh.sequence_size == 1
        if is_alone and sharding.patterns.pattern == Causal() and not sharding.groups:
            return forward(*args, **kwargs)  # the model's own attention would be right
        before = forward_passes()
        with nullcontext() if is_alone or self._engine.is_compiled else _PlainAttention(sharding):
            output = forward(*args, **kwargs)
        if forward_passes() == before:
            raise RingConfigError(_no_pass(sharding))
        self._seen.add(training)
        return output


def _no_pass(sharding: BatchSharding) -> str:
    if sharding.mesh.sequence_size > 1:
        tokens = f"the {sharding.local_tokens} tokens of this rank only, of {sharding.layout.tokens}"
        fault = f"attention saw {tokens}"
    else:
        documents = " with documents" if sharding.groups else ""
        fault = f"the pattern {sharding.patterns.pattern}{documents} was not applied"
    return (
        "expected the model to use ring attention, but no ring pass ran in its forward pass:"
        f" {fault}; {_WHAT_TO_DO}"
    )


class _PlainAttention(TorchFunctionMode):
    """Refuse attention outside the ring over exactly the tokens of this rank."""

    # Between other lengths (a few latents, an encoder's output) attention may be meant as it is.

    def __init__(self, sharding: BatchSharding) -> None:
        super().__init__()
        self._tokens = sharding.local_tokens
        self._all_tokens = sharding.layout.tokens

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        given = [x for x in (*args, *(kwargs or {}).values()) if isinstance(x, torch.Tensor)]
        if (
            (name in _PLAIN and self._is_local(given, -2))
            or (name == _MULTIHEAD and self._is_local(given, 0))
            or (name in _SOFTMAX and self._is_scores(given))
        ):
            raise RingConfigError(
                f"expected ring attention, got {name} over the {self._tokens} tokens of this rank, of"
                f" {self._all_tokens}: that part of the model would see no other rank's; {_WHAT_TO_DO}"
            )
        return func(*args, **(kwargs or {}))

    def _is_local(self, given: list[torch.Tensor], dim: int) -> bool:
        """Return whether queries and keys are this rank's tokens, which lie in a dimension."""
        return all(x.ndim >= 2 and x.shape[dim] == self._tokens for x in given[:2])

    def _is_scores(self, given: list[torch.Tensor]) -> bool:
        """Return whether these are scores of attention written out: [(batch, heads,) ..., tokens, tokens]."""
        return bool(given) and given[0].ndim >= 3 and given[0].shape[-2:] == (self._tokens, self._tokens)
