"""Give families of transformers models what they need beside the ring's attention.

Owns the order in which a model is equipped when it is tied to a session: length-dependent rotary embeddings
(rotary.py), numbering of tokens (numbering.py), router losses (router_loss.py), temperature by position
(temperature.py), images (images.py), pooling heads (heads.py), and what the JSON's "long_sequence" asks for
(tiled_head.py, tiled_layers.py, offloaded_checkpoints.py). A model that has none of these is left alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from ds_ring.errors import RingConfigError
from ds_ring.integrations.deepspeed.batch_sharding import BatchSharding
from ds_ring.integrations.deepspeed.sequence_sum import number_of, sequence_sum_op, shared_scale
from ds_ring.integrations.deepspeed.session import RingSession
from ds_ring.integrations.transformers.heads import pool_over_ranks, pools_the_last_token
from ds_ring.integrations.transformers.images import give_features, towers
from ds_ring.integrations.transformers.loss_guard import LossGuard
from ds_ring.integrations.transformers.numbering import check_numbers_once, numbering_of
from ds_ring.integrations.transformers.offloaded_checkpoints import offload_checkpoints
from ds_ring.integrations.transformers.rotary import give_length
from ds_ring.integrations.transformers.router_loss import RouterLoss, read_router_loss
from ds_ring.integrations.transformers.temperature import tune_by_position
from ds_ring.integrations.transformers.tiled_head import tile_loss
from ds_ring.integrations.transformers.tiled_layers import tile_layers


def equip(model: PreTrainedModel, session: RingSession) -> tuple[LossGuard, list[RemovableHandle]]:
    """Give `model` what its family needs of the whole sequence.

    Returns the guard of its loss function, and the handles of all hooks.

    Raises:
        RingConfigError: it needs something that a ring cannot give it.
    """
    scale = shared_scale(session.mesh, session.gradient_divisor)
    tile_layers(model, session)
    tiles = tile_loss(model, session)
    guard = LossGuard(model.loss_function, scale if pools_the_last_token(model) else None)
    model.loss_function = guard
    handles = [
        *offload_checkpoints(model, session),
        *tiles,
        # towers number patches of their own
        *([] if towers(model) else check_numbers_once(model, session.mesh)),
        *give_length(model, session.batches),
        *tune_by_position(model),
        *give_features(model, session),
    ]
    session.needs.number_tokens = numbering_of(model) or session.needs.number_tokens
    handles.append(_count_all_routers(model, guard, session))
    if pools_the_last_token(model):
        session.needs.slots = True
        handles += pool_over_ranks(model, session)
    return guard, handles


def _count_all_routers(model: PreTrainedModel, guard: LossGuard, session: RingSession) -> RemovableHandle:
    """Replace the load balancing loss of local tokens, and its part of the loss, by that of all tokens."""
    # A loss that cannot be replaced is refused where it is computed: most models never ask for it.
    router: RouterLoss | RingConfigError | None
    try:
        router = read_router_loss(model)
    except RingConfigError as refused:
        router = refused
    if isinstance(router, RouterLoss):
        session.needs.slots = session.needs.real_tokens = True
    scale = shared_scale(session.mesh, session.gradient_divisor)

    def after(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not isinstance(getattr(output, "aux_loss", None), Tensor):
            return  # without output_router_logits there is none
        if getattr(output, "router_logits", None) is None:
            raise RingConfigError(
                f"{type(model).__name__}: expected router_logits beside aux_loss, got none (TRL's head drops"
                " them): set router_aux_loss_coef=0.0"
            )
        if not isinstance(router, RouterLoss):
            raise router or RingConfigError(
                f"{type(model).__name__}: expected no aux_loss, got one, of this rank's tokens; leave out the"
                " option that asks for it (output_router_logits)"
            )
        counted_BS = _counted(session.batches.current, output.router_logits[0])
        number = number_of(session.mesh)
        exact = scale * router(output.router_logits, counted_BS, lambda x: sequence_sum_op(x, number))
        output.aux_loss = exact
        if output.loss is not None and guard.own is not None:
            output.loss = guard.own + router.weight * exact
            guard.expect(output.loss)

    return model.register_forward_hook(after)


def _counted(sharding: BatchSharding, router_logits: Tensor) -> Tensor:
    """Return 1 for local tokens that one process would count, 0 for padding of batch or layout: [B, S]."""
    if sharding.real_tokens is not None:
        return sharding.real_tokens
    assert sharding.slots is not None
    rows = router_logits.numel() // router_logits.shape[-1] // sharding.local_tokens
    return (sharding.slots >= 0).to(torch.float32).expand(rows, -1)
