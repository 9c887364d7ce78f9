"""Compare one process with the ring: loss, every gradient, tensor memory; same weights, same batch.

On one process the model runs with transformers' own attention and a mask from the pattern's definition, so
that no code of the ring is used twice. Shapes: B samples, H query heads, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import deepspeed
import numpy as np
import torch
from torch import Tensor, nn

from ds_ring.comm.groups import gather_objects
from ds_ring.engines.first_batch.first_batch import Tolerance, compare_gradients, largest
from ds_ring.masks.catalog import Causal
from ds_ring.masks.pattern import Pattern
from ds_ring.measure.memory import MemoryPeak, measure_cpu_memory
from ds_ring.patterns.documents.pattern import Documents

MIB = 2**20


@dataclass(frozen=True)
class Comparison:
    """Hold the differences of two runs of one batch, of `samples` x `tokens`."""

    samples: int
    tokens: int
    loss_alone: float  # mean over the labelled tokens, as `loss_on_ring`
    loss_on_ring: float
    gradients: int  # number of parameters, each compared by itself
    worst: str  # the parameter whose gradient differs most
    gradient_difference: float  # of its gradient, relative to the norm
    alone_mib: float  # peak tensor memory of forward + backward, as `ranks_mib` by rank
    ranks_mib: list[float]
    exact: bool  # whether rounding explains the differences

    def rows(self) -> dict[str, str]:
        """Return the figures by name, for the terminal and the report."""
        memory = "tensor memory of forward + backward, "
        share = f" ({100 * max(self.ranks_mib) / self.alone_mib:.0f} %)"
        return {
            f"loss of the trained model on {self.samples} x {self.tokens} tokens, one process":
                f"{self.loss_alone:.6f}",
            "the same on the ring": f"{self.loss_on_ring:.6f}",
            "difference": f"{abs(self.loss_on_ring - self.loss_alone):.1e}",
            f"largest difference of {self.gradients} gradients, each by itself, over its norm":
                f"{self.gradient_difference:.1e} ({self.worst})",
            f"{memory}one process": f"{self.alone_mib:.0f} MiB",
            f"{memory}each rank": ", ".join(f"{mib:.0f}" for mib in self.ranks_mib) + f" MiB{share}",
        }  # fmt: skip


class _Run(NamedTuple):
    loss: float
    gradients: dict[str, Tensor]
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
    parameters = list(engine.module.parameters())
    with deepspeed.zero.GatheredParameters(parameters, enabled=engine.zero_optimization_stage() == 3):
        plain.to(engine.ring.device).load_state_dict(engine.module.state_dict())
    alone = _alone(plain, {name: x.to(engine.ring.device) for name, x in whole.items()}, pattern)
    ring = _on_the_ring(engine, whole)
    worst = largest(compare_gradients(ring.gradients, alone.gradients))["gradient"]
    tolerance = Tolerance.for_dtype(parameters[0].dtype)
    loss_error = abs(ring.loss - alone.loss) / max(abs(alone.loss), 1e-6)
    exact = worst.error <= tolerance.gradients and loss_error <= tolerance.loss  # not if one is NaN
    ranks = gather_objects((ring.peak_bytes / MIB, worst, exact))
    peaks, differences, verdicts = zip(*ranks, strict=True)
    worst = max(differences, key=lambda difference: difference.error)
    samples, tokens = whole["input_ids"].shape
    return Comparison(
        samples, tokens, alone.loss, ring.loss, len(alone.gradients), worst.name, worst.error,
        alone.peak_bytes / MIB, list(peaks), all(verdicts),
    )  # fmt: skip


def _alone(plain: nn.Module, whole: dict[str, Tensor], pattern: Pattern) -> _Run:
    batch = _for_one_process(whole, pattern, plain.config)
    with _measuring() as memory:
        loss = plain.train()(**batch, use_cache=False).loss
        loss.backward()
    gradients = {name: p.grad.float() for name, p in plain.named_parameters() if p.grad is not None}
    return _Run(float(loss.detach()), gradients, memory.peak_bytes)


def _on_the_ring(engine: Any, whole: dict[str, Tensor]) -> _Run:
    mesh, micro_batches = engine.ring.run_mesh, engine.gradient_accumulation_steps()
    mine = {name: x.chunk(mesh.data_size)[mesh.data_rank] for name, x in whole.items()}
    batch = engine.ring.shard_batch(mine)
    with _measuring() as memory:
        for micro_batch in range(1, micro_batches + 1):  # the same each time: their mean is the batch's
            loss = engine(**batch).loss
            engine.backward(loss)
            if micro_batch < micro_batches:
                engine.step()
    scale = getattr(engine.optimizer, "loss_scale", 1.0)
    gradients = {
        name: deepspeed.utils.safe_get_full_grad(parameter).float() / scale
        for name, parameter in engine.module.named_parameters()
    }
    return _Run(float(engine.ring.mean_loss(loss.detach())), gradients, memory.peak_bytes)


def _for_one_process(whole: dict[str, Tensor], pattern: Pattern, config: Any) -> dict[str, Any]:
    """Return the batch for transformers: mask, positions within documents, no label across their borders."""
    ids_BT, labels_BT = whole["input_ids"], whole["labels"].clone()
    places_T = torch.arange(ids_BT.shape[1], device=ids_BT.device)
    batch = {"input_ids": ids_BT, "labels": labels_BT, "position_ids": places_T.expand_as(ids_BT)}
    documents_BT, patterns = whole.get("document_ids"), [pattern] * len(ids_BT)
    if documents_BT is not None:
        begins_BT = documents_BT != documents_BT.roll(1, dims=1)
        begins_BT[:, 0] = True
        batch["position_ids"] = places_T - (places_T * begins_BT).cummax(dim=1).values
        labels_BT[begins_BT] = -100
        patterns = [pattern & Documents(ids_T.cpu()) for ids_T in documents_BT]
    if patterns != [Causal()] * len(patterns):
        masks = [_mask(row_pattern, config, ids_BT.shape[1]) for row_pattern in patterns]
        batch["attention_mask"] = torch.stack(masks).to(ids_BT.device)
    return batch


def _mask(pattern: Pattern, config: Any, tokens: int) -> Tensor:
    """Return the addend of the scores, [H, T, T]: the logarithm of how often a query sees a key."""
    places_T = np.arange(tokens)
    pairs = places_T[:, None], places_T[None, :]
    heads = config.num_attention_heads, config.num_key_value_heads
    counts = [pattern.multiplicity(head, *heads, *pairs) for head in range(heads[0])]
    return torch.from_numpy(np.stack(counts)).float().log()


@contextmanager
def _measuring() -> Iterator[MemoryPeak]:
    """Measure the growth of tensor memory in a block at its peak, on the CPU or on CUDA."""
    if not torch.cuda.is_available():
        with measure_cpu_memory() as peak:
            yield peak
        return
    torch.cuda.reset_peak_memory_stats()
    before, peak = torch.cuda.memory_allocated(), MemoryPeak()
    yield peak
    peak.peak_bytes = torch.cuda.max_memory_allocated() - before
