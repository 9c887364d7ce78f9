"""The same weights and the same batch on one process and on the ring: loss, every gradient, tensor memory.

Owns what the training script shows at its end. On one process the model runs with transformers' own attention
and a mask that is made of the pattern's definition, so that nothing of the ring is used twice.

Shapes: B samples, H query heads, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_ring.integrations.deepspeed import first_batch
from ds_ring.integrations.deepspeed.first_batch import Numbers
from ds_ring.masks.catalog import Causal, Documents
from ds_ring.masks.pattern import Pattern
from ds_ring.memory.deferred_logits import DeferredLogits
from ds_ring.ring.trace import MemoryPeak, measure_cpu_memory

MIB = 2**20


@dataclass(frozen=True)
class Comparison:
    """What the two runs differ in."""

    # samples, tokens: of the batch
    samples: int
    tokens: int
    # loss_alone, loss_on_ring: mean over the labelled tokens
    loss_alone: float
    loss_on_ring: float
    gradients: int  # parameters that were compared, each by itself
    # worst, gradient_difference: the parameter whose gradient differs most, and by how much of its norm
    worst: str
    gradient_difference: float
    # alone_mib, ranks_mib: peak tensor memory of forward + backward above what lived before, MiB; by rank
    alone_mib: float
    ranks_mib: list[float]
    exact: bool  # whether rounding explains the differences

    def lines(self) -> str:
        """Return the three lines for the terminal."""
        ranks = ", ".join(f"{mib:.0f}" for mib in self.ranks_mib)
        share = 100 * max(self.ranks_mib) / self.alone_mib
        return (
            f"same weights, same batch ({self.samples} x {self.tokens} tokens): loss on one process"
            f" {self.loss_alone:.6f}, on the ring {self.loss_on_ring:.6f},"
            f" difference {abs(self.loss_on_ring - self.loss_alone):.1e}\n"
            f"gradients of {self.gradients} parameters, each by itself: largest difference"
            f" {self.gradient_difference:.1e} of the norm ({self.worst})\n"
            f"tensor memory of forward + backward: one process {self.alone_mib:.0f} MiB,"
            f" each rank {ranks} MiB ({share:.0f} %)"
        )


class _Run(NamedTuple):
    numbers: Numbers
    peak_bytes: int


def compare(engine: Any, plain: nn.Module, whole: dict[str, Tensor], pattern: Pattern) -> Comparison:
    """Compare the engine's model with `plain`, which gets its weights. Collective; every rank compares.

    Args:
        engine: of `ds_ring.initialize`, in training mode. Its gradients are of this batch afterwards.
        plain: the same model with attn_implementation="sdpa".
        whole: input_ids and labels [B, T], document_ids where the pattern keeps documents apart; the same on
            every rank, with as many samples for each data replica.
        pattern: of the JSON.
    """
    device = engine.ring.device
    plain.to(device).load_state_dict(_weights(engine))
    alone = _alone(plain, {name: x.to(device) for name, x in whole.items()}, pattern)
    ring = _on_the_ring(engine, whole)
    found = first_batch.compare(ring.numbers, alone.numbers)
    worst = first_batch.largest(found)["gradient"]
    in_float8 = engine.ring.config.kv_payload == "float8"
    tolerance = first_batch.Tolerance.of(next(plain.parameters()).dtype, in_float8)
    exact = not first_batch.beyond(found, tolerance)
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, (ring.peak_bytes / MIB, worst, exact))
    worst = max((one for _, one, _ in ranks), key=lambda one: one.error)
    samples, tokens = whole["input_ids"].shape
    return Comparison(
        samples=samples,
        tokens=tokens,
        loss_alone=_loss(alone),
        loss_on_ring=_loss(ring),
        gradients=len(alone.numbers.gradients),
        worst=worst.name,
        gradient_difference=worst.error,
        alone_mib=alone.peak_bytes / MIB,
        ranks_mib=[mib for mib, _, _ in ranks],
        exact=all(one for _, _, one in ranks),
    )


def _loss(run: _Run) -> float:
    assert run.numbers.loss is not None, "both runs have a loss"
    return run.numbers.loss


def _weights(engine: Any) -> dict[str, Tensor]:
    """The model's weights, whole at every ZeRO stage. Collective at ZeRO 3."""
    parameters = list(engine.module.parameters())
    with deepspeed.zero.GatheredParameters(parameters, enabled=engine.zero_optimization_stage() == 3):
        return {name: x.detach().clone() for name, x in engine.module.state_dict().items()}


def _alone(plain: nn.Module, whole: dict[str, Tensor], pattern: Pattern) -> _Run:
    batch = _for_one_process(whole, pattern, plain.config)
    with _measuring() as memory:
        output = plain.train()(**batch, use_cache=False)
        output.loss.backward()
    gradients = {name: p.grad.float() for name, p in plain.named_parameters() if p.grad is not None}
    numbers = Numbers(output.logits.detach(), float(output.loss.detach()), gradients=gradients)
    return _Run(numbers, memory.peak_bytes)


def _on_the_ring(engine: Any, whole: dict[str, Tensor]) -> _Run:
    mesh, micro_batches = engine.ring.mesh, engine.gradient_accumulation_steps()
    mine = {name: x.chunk(mesh.data_size)[mesh.data_rank] for name, x in whole.items()}
    batch = engine.ring.shard_batch(mine)
    with _measuring() as memory:
        for micro_batch in range(1, micro_batches + 1):  # the same each time: their mean is the batch's
            output = engine(**batch)
            engine.backward(output.loss)
            if micro_batch < micro_batches:
                engine.step()
    scale = getattr(engine.optimizer, "loss_scale", 1.0)
    gradients = {
        name: deepspeed.utils.safe_get_full_grad(parameter).float() / scale
        for name, parameter in engine.module.named_parameters()
    }
    with torch.no_grad():  # all local logits, with "tiled_loss", too: these samples are short
        local = output.logits
        logits = engine.ring.gather(local.tensor() if isinstance(local, DeferredLogits) else local.detach())
    if mesh.data_size > 1:  # the samples of every data replica, in order
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, (mesh.data_rank, logits.cpu()))
        by_replica = dict(reversed(parts))
        logits = torch.cat([by_replica[replica] for replica in range(mesh.data_size)]).to(logits.device)
    loss = float(engine.ring.mean_loss(output.loss.detach()))
    return _Run(Numbers(logits, loss, gradients=gradients), memory.peak_bytes)


def _for_one_process(whole: dict[str, Tensor], pattern: Pattern, config: Any) -> dict[str, Any]:
    """The batch as transformers takes it: mask, positions within documents, no label across their borders."""
    ids_BT, labels_BT = whole["input_ids"], whole["labels"].clone()
    samples, tokens = ids_BT.shape
    places_T = torch.arange(tokens, device=ids_BT.device)
    positions_BT = places_T.repeat(samples, 1)
    documents_BT = whole.get("document_ids")
    if documents_BT is not None:
        begins_BT = documents_BT != documents_BT.roll(1, dims=1)
        begins_BT[:, 0] = True
        positions_BT = places_T - (places_T * begins_BT).cummax(dim=1).values
        labels_BT[begins_BT] = -100
    if documents_BT is None and pattern == Causal():
        return {"input_ids": ids_BT, "labels": labels_BT, "position_ids": positions_BT}
    masks = [
        _mask(
            pattern if documents_BT is None else pattern & Documents(documents_BT[sample].cpu()),
            config,
            tokens,
        )
        for sample in range(samples)
    ]
    mask_BHTT = torch.stack(masks).to(ids_BT.device)
    return {
        "input_ids": ids_BT, "labels": labels_BT, "position_ids": positions_BT, "attention_mask": mask_BHTT
    }  # fmt: skip


def _mask(pattern: Pattern, config: Any, tokens: int) -> Tensor:
    """What the pattern adds to the scores, [H, T, T]: the logarithm of how often a query sees a key."""
    places_T = np.arange(tokens)
    heads = (config.num_attention_heads, config.num_key_value_heads)
    counts = [
        pattern.multiplicity(head, *heads, places_T[:, None], places_T[None, :]) for head in range(heads[0])
    ]
    return torch.from_numpy(np.stack(counts)).float().log()


@contextmanager
def _measuring() -> Iterator[MemoryPeak]:
    """Peak tensor memory of a block above what lived before, on the CPU or on CUDA."""
    if not torch.cuda.is_available():
        with measure_cpu_memory() as peak:
            yield peak
        return
    torch.cuda.reset_peak_memory_stats()
    before, peak = torch.cuda.memory_allocated(), MemoryPeak()
    yield peak
    peak.peak_bytes = torch.cuda.max_memory_allocated() - before
