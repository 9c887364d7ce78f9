"""A transformers model on a ring without an engine, and on one process: losses and summed gradients.

Owns the session, the training of some batches and the comparison. Models and batches are the tests'.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.dist.deepspeed_ranks import Batch, Run, check_gradients

SIZES: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4,
}  # fmt: skip
GROUPED: dict[str, Any] = SIZES | {"num_key_value_heads": 2}


def build(config: str, values: dict[str, Any], implementation: str, head: str = "CausalLM") -> Any:
    """A model with random weights; the same on every rank."""
    import transformers

    torch.manual_seed(0)
    built = getattr(transformers, config)(**values)
    return getattr(transformers, f"AutoModelFor{head}").from_config(built, attn_implementation=implementation)


def start_session(world_size: int, divisor: float = 1.0, **section: Any) -> Any:
    """A session on all ranks. Gradients are summed by hand and divided by `divisor`, as an engine does."""
    from ds_ring import RingMesh
    from tests.sessions import session_of

    ulysses_size = section.get("ulysses_size", 1)
    return session_of(RingMesh.from_world(world_size // ulysses_size, ulysses_size), divisor, **section)


def attached(model: Any, session: Any) -> Any:
    from ds_ring.models.attach import attach

    attach(model, session)
    return model


def gradients_of(model: torch.nn.Module, divisor: float = 0.0) -> dict[str, Tensor]:
    """Those of this rank, or (by a divisor) the sum over ranks divided by it."""
    result = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for gradient in result.values() if divisor else ():
        dist.all_reduce(gradient)
        gradient /= divisor
    return result


def train_alone(model: Any, batches: Sequence[Batch]) -> Run:
    """Losses of batches on one process, and the sum of their gradients."""
    losses = []
    for batch in batches:
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        losses.append(loss.item())
    return Run(losses, gradients_of(model))


def train_on_ring(model: Any, session: Any, batches: Sequence[Batch], call: Any = None) -> Run:
    """The same on a ring; `call` is what is called where that is not the model itself."""
    losses = []
    for batch in batches:
        loss = (model if call is None else call)(**session.shard_batch(batch)).loss
        loss.backward()
        losses.append(session.mean_loss(loss).item())
    return Run(losses, gradients_of(model, session.gradient_divisor))


def check(got: Run, expected: Run, least: float = 0.0) -> None:
    """Every loss, and each gradient by itself; gradients below `least` of the largest one are rounding."""
    assert got.losses == pytest.approx(expected.losses, rel=1e-5)
    check_gradients(got.gradients, expected.gradients, 1e-5, least)
