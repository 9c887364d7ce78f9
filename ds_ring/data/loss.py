"""Compute the token-weighted loss whose gradient is exact at every ZeRO stage."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy

from ds_ring.comm.exchange import Exchange, make_batch_exchange
from ds_ring.comm.mesh import RingMesh
from ds_ring.compat.torch import operator
from ds_ring.data.batch import IGNORE, LABEL_KEYS, LOSS_WEIGHTS, check_local
from ds_ring.errors import RingConfigError, RingShapeError
from ds_ring.ops.context import get_object, new_handle
from ds_ring.ring.merge import get_accumulator_dtype


class RingLoss(NamedTuple):
    """Hold what a training step needs of a loss.

    Attributes:
        backward_loss: this rank's part, for `engine.backward`; not a mean of anything by itself.
        mean_loss: mean over all labelled tokens of the world's batch, the same on all ranks, detached.
        valid_tokens: the number of those tokens.
    """

    backward_loss: Tensor
    mean_loss: Tensor
    valid_tokens: Tensor


class DocumentLosses(NamedTuple):
    """Hold the losses of the documents of a batch, row by row in the order in which they begin.

    Attributes:
        means: of the labelled tokens of each document, float64 [documents]; NaN where it has none.
        labelled_tokens: their number, int64 [documents].
    """

    means: Tensor
    labelled_tokens: Tensor


def sum_document_losses(both_BT2: Tensor, numbers_BT: Tensor) -> DocumentLosses:
    """Return the losses of documents.

    Args:
        both_BT2: of all tokens, the loss, and 1 where they have a label, else 0 and 0.
        numbers_BT: of the tokens' documents; -1 for none.
    """
    index, both = numbers_BT.flatten() + 1, both_BT2.double().flatten(0, 1)
    sums = both.new_zeros(int(index.max()) + 1, 2).index_add_(0, index, both)[1:]
    return DocumentLosses(sums[:, 0] / sums[:, 1], sums[:, 1].long())


_NOT_OF_MODELS = (*LABEL_KEYS, "num_items_in_batch", LOSS_WEIGHTS)  # what `logprobs` keeps from a model


# [Note: gradient scale]
# With `mpu=None` DeepSpeed 0.19.8 reduces gradients over the whole world of W ranks, ring neighbours
# included, and divides the sum by D: D = W at ZeRO 0, 1, 2 and 3, with `reduce_scatter` on or off (measured
# ratio 1/W, deviation 0; in deepspeed.runtime: allreduce_bucket of engine, average_tensor of
# zero.stage_1_and_2, __avg_scatter_grads of zero.stage3), and D = 1 with `"gradient_allreduce_op": "sum"`.
# The gradient of the mean over all N labelled tokens of the world's batch is sum over ranks of
# grad(local_sum) / N. So every rank's loss is local_sum * D / N: its gradient survives the division exactly,
# and it does not depend on how the tokens (or the labels among them) are spread over ranks, nor on the ring
# size.
#
# N is one batch's. Over gradient accumulation steps DeepSpeed averages the micro-batches, each a mean over
# its own tokens, as it does without a ring.
def items_per_batch(valid_tokens: int, gradient_divisor: float, device: torch.device) -> Tensor:
    """Return N / D of [Note: gradient scale], which a local sum is divided by; 1 / D without labels."""
    # transformers' losses divide by it when it is given as `num_items_in_batch`. A float32 tensor and not a
    # float, so that `tensor.to(device)` over a whole batch works.
    return torch.tensor(max(valid_tokens, 1) / gradient_divisor, dtype=torch.float32, device=device)


ITEMS = "num_items_in_batch"
OWN_ITEMS = (
    "a batch gets its own from ds_ring: the labelled tokens of all ranks, over the number of ranks. To weigh"
    " the micro-batches of a step by their tokens, multiply each loss by steps * n / (the sum of n over the"
    " step), where n is a sharded batch's num_items_in_batch"
)


def check_items(where: str, items: object) -> None:
    """Refuse a number of tokens that a user counted, by which a rank's sum would be divided.

    Raises:
        RingConfigError: it is whole; that of a sharded batch is a float.
    """
    is_whole = isinstance(items, int) or (isinstance(items, Tensor) and not items.is_floating_point())
    if is_whole:
        raise RingConfigError.wrong(f"{where}: {ITEMS}", "that of the batch", items, OWN_ITEMS)


class UncomputedLogits(Protocol):
    """Logits [B, S, V] that a model returns uncomputed: they know their loss."""

    def loss(self, labels: Tensor, items: Tensor | float) -> Tensor:
        """Return the summed cross entropy [] of the labelled tokens over `items`."""

    def logprobs(self, labels: Tensor, of_logits: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Return what `of_logits` makes of the logits and the labels of any tokens, [B, S, 2]."""

    def tensor(self) -> Tensor:
        """Return all logits [B, S, V]."""


def logprobs_and_entropies(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the log-probability of each label [...] (0 without one) and the entropy, [..., 2] in float32.

    Of float64 logits [..., V] they are float64.
    """
    all_of = logits.to(get_accumulator_dtype(logits.dtype)).log_softmax(dim=-1)
    chosen = all_of.gather(-1, labels.clamp_min(0)[..., None])[..., 0].masked_fill(labels == IGNORE, 0)
    return torch.stack([chosen, -(all_of.exp() * all_of).sum(dim=-1)], dim=-1)


def local_loss(logits_BSV: Tensor | UncomputedLogits, labels_BS: Tensor, items: Tensor) -> Tensor:
    """Return summed cross entropy of the local tokens over `items`; labels are aligned with their logits."""
    if not isinstance(logits_BSV, Tensor):
        return logits_BSV.loss(labels_BS, items)
    flat = logits_BSV.float().flatten(0, 1)
    return cross_entropy(flat, labels_BS.flatten(), ignore_index=IGNORE, reduction="sum") / items


def compute_logprobs(
    model: Callable[..., Any],
    batch: Mapping[str, Tensor],
    defer_logits: Callable[[], AbstractContextManager[None]],
    entropies: bool,
) -> Any:
    """Return the log-probabilities of a batch's labels, and the entropies: see `RingSession.logprobs`."""
    check_local("logprobs", batch, "shift_labels")
    inputs = {key: x for key, x in batch.items() if key not in _NOT_OF_MODELS}
    with defer_logits():
        output = model(**inputs)
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if logits is None:
        expected, advice = "logits, or an output with `.logits`", "let the model return its logits"
        raise RingShapeError.wrong("logprobs", expected, type(output).__name__, advice)
    labels = batch["shift_labels"]
    both = (
        logprobs_and_entropies(logits, labels)
        if isinstance(logits, Tensor)
        else logits.logprobs(labels, logprobs_and_entropies)
    )
    return (both[..., 0], both[..., 1]) if entropies else both[..., 0]


def world_mean(loss: Tensor, gradient_divisor: float, mesh: RingMesh) -> Tensor:
    """Return the mean over the world's labelled tokens, out of every rank's `local_loss`. Collective."""
    check_loss("mean_loss", loss)
    return world_sum(loss.detach().float().clone(), mesh) / gradient_divisor


def check_loss(function: str, loss: object) -> None:
    """Raise RingShapeError unless `loss` is a tensor: a model without labels returns None."""
    if isinstance(loss, RingLoss):
        advice = "pass loss.backward_loss, or log loss.mean_loss"
        raise RingShapeError.wrong(function, "a tensor", "what engine.ring.loss returns", advice)
    if not isinstance(loss, Tensor):
        raise RingShapeError.wrong(function, "a model's loss", type(loss).__name__, "give labels in a batch")


def world_sum(total: Tensor, mesh: RingMesh, exchange: Exchange | None = None) -> Tensor:
    """Add up every rank's tensor, in place; return it. Collective.

    `exchange` has the limit of the wait; None for `step_timeout_seconds`.
    """
    if dist.is_initialized() and dist.get_world_size() > 1:
        assert dist.group.WORLD is not None
        exchange = exchange or make_batch_exchange(mesh, "a sum over all ranks")
        exchange.all_reduce(total, dist.group.WORLD)
    return total


# Sum over the ranks that share a sequence, with its gradient: for values of the whole sequence from which
# every rank computes the same term of the loss (the token counts of a router). Attention does not use it.

_numbers: weakref.WeakKeyDictionary[RingMesh, int] = weakref.WeakKeyDictionary()


def get_mesh_number(mesh: RingMesh) -> int:
    """Return the number by which a compiled graph refers to `mesh`."""
    if mesh not in _numbers:
        _numbers[mesh] = new_handle(mesh, mesh.place)
    return _numbers[mesh]


# [Note: gradient of what all ranks compute]
# Every rank of a sequence computes the same term L of the loss from the sum, so dL / d(sum) is the same on
# all of them. DeepSpeed adds the gradients of all W ranks of the world and divides by D ([Note: gradient
# scale] in loss.py). So each rank adds L * D / W to its loss (`shared_scale`); the logged losses then add up
# to the mean of L over the sequences. The gradient with respect to a rank's own summand is the sum over the
# terms of all ranks. These are equal, so it is `sequence_size` times the rank's own gradient and needs no
# message.
def shared_scale(mesh: RingMesh, gradient_divisor: float) -> float:
    """Return D / W of [Note: gradient of what all ranks compute]."""
    world = dist.get_world_size() if dist.is_initialized() else mesh.sequence_size
    return gradient_divisor / world


def _gather_ranks(local: Tensor, number: int) -> Tensor:
    """Return [ranks of the sequence, ...], every rank's `local`. Collective."""
    mesh = get_object(number, RingMesh)
    exchange = Exchange(mesh, mesh.timeouts.hop)
    return torch.stack(exchange.all_gather(local, mesh.sequence_group, mesh.sequence_size))


@operator("ds_ring::sequence_sum")
def sequence_sum_op(local: Tensor, number: int) -> Tensor:
    """Return the sum of all ranks' `local`, bitwise equal on all ranks. Collective in the sequence group.

    `local` has the same shape on every rank, `number` is what `get_mesh_number` returns.
    """
    return _gather_ranks(local, number).sum(dim=0)


sequence_sum_op.register_fake(lambda local, number: torch.empty_like(local))


def _keep_mesh(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
    ctx.sequence_size = get_object(inputs[1], RingMesh).sequence_size


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    return gradient * ctx.sequence_size, None


sequence_sum_op.register_autograd(_backward, setup_context=_keep_mesh)


@operator("ds_ring::sequence_max")
def sequence_max_op(local: Tensor, number: int) -> Tensor:
    """Return the elementwise maximum of all ranks' `local`; no gradient. Collective in the sequence."""
    return _gather_ranks(local, number).amax(dim=0)


sequence_max_op.register_fake(lambda local, number: torch.empty_like(local))
