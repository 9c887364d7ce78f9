"""Delta rules on Ulysses ranks: losses and every gradient of one process, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ds_ring.layers.scan.context import ScanContext
from ds_ring.layers.scan.sequence_runs import pieces
from ds_ring_launcher.check.rounding import InFloat64, in_float64
from ds_ring_launcher.check.small_model import build, read_config, shrink
from tests.dist.deepspeed_ranks import Batch, Run
from tests.dist.family_ranks import attached, gradients_of, start_session, train_on_ring
from tests.dist.harness import Pool
from tests.reference import relative_error

TOKENS, SAMPLES = 61, 2
LENGTHS = (23, 9, 29)  # of packed documents


def model_of(family: str, **changes: int) -> Any:
    config = shrink(read_config(family), TOKENS, 2, {})
    config.update(changes)
    return in_float64(build(config, "causal-lm", 0)).eval()


def batch_of(packed: bool) -> Batch:
    drawn = torch.Generator().manual_seed(3)
    ids = torch.randint(5, 50, (SAMPLES, TOKENS), generator=drawn)
    labels = ids.masked_fill(torch.rand(ids.shape, generator=drawn) < 0.3, -100)
    batch = {"input_ids": ids, "labels": labels}
    documents = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    return batch | ({"document_ids": documents.expand(SAMPLES, -1)} if packed else {})


def alone(family: str, packed: bool) -> Run:
    """Each document by itself, with transformers' own functions and no ring."""
    model, batch, parts, labelled = model_of(family), batch_of(packed), [], 0
    with InFloat64():
        lengths = LENGTHS if packed else (TOKENS,)
        for ids, labels in zip(
            *(batch[key].split(lengths, 1) for key in ("input_ids", "labels")), strict=True
        ):
            logits, wanted = model(ids, use_cache=False).logits[:, :-1], labels[:, 1:]
            parts.append(torch.nn.functional.cross_entropy(logits.mT, wanted, reduction="sum"))
            labelled += int((wanted != -100).sum())
        loss = torch.stack(parts).sum() / labelled
        loss.backward()
    return Run([loss.item()], gradients_of(model))


def on_ring(rank: int, world_size: int, family: str, ulysses: int, packed: bool, fault: str = "") -> Run:
    """The same on a ring."""
    section = {"ulysses_size": ulysses, "pattern": {"documents": packed}}
    session = start_session(world_size, **section)
    model = attached(model_of(family), session)
    built, masks = ScanContext.__post_init__, ScanContext.masks

    def passes_on(self: ScanContext) -> None:
        built(self)
        self.pieces = pieces(self.layout, ulysses, self.mesh.sequence_rank, None)

    if fault == "documents":  # states pass from one document to the next
        ScanContext.__post_init__ = passes_on  # type: ignore[method-assign]
    if fault == "states":  # none passes through a run of a rank
        ScanContext.masks = lambda self, like: (0 * masks(self, like)[0], masks(self, like)[1])  # type: ignore[method-assign]
    try:
        with InFloat64():
            return train_on_ring(model, session, [batch_of(packed)])
    finally:
        ScanContext.__post_init__, ScanContext.masks = built, masks  # type: ignore[method-assign]


def largest(got: Run, want: Run) -> float:
    assert got.gradients.keys() == want.gradients.keys()
    errors = [relative_error(got.gradients[name], entry) for name, entry in want.gradients.items()]
    return max(*errors, abs(got.losses[0] / want.losses[0] - 1))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("world_size", "ulysses"), [(2, 2), (4, 2)])
@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text", "kimi_linear"])
@pytest.mark.covering(1)
def test_losses_and_gradients_are_those_of_one_process(
    rank_pool: Pool, family: str, world_size: int, ulysses: int, packed: bool
) -> None:
    want = alone(family, packed)
    most = 1e-6 if family == "kimi_linear" else 1e-9  # Kimi's gates are float32 in any case
    for got in rank_pool(world_size).run(on_ring, family, ulysses, packed):
        assert largest(got, want) < most


@pytest.mark.parametrize(("fault", "packed"), [("documents", True), ("states", False)])
def test_states_that_pass_wrongly_are_found(rank_pool: Pool, fault: str, packed: bool) -> None:
    want = alone("qwen3_next", packed)
    for got in rank_pool(4).run(on_ring, "qwen3_next", 2, packed, fault):
        assert largest(got, want) > 1e-3
