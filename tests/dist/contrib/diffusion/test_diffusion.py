"""Block diffusion of an unmodified causal model on a ring: 50 steps have the losses of one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ds_ring import Alibi, RingPatternError, RingShapeError
from ds_ring.contrib.diffusion.batch import BLOCKS, DiffusionRows, diffusion_batch, make_block_numbers
from ds_ring.data.batch import IGNORE
from ds_ring.data.packing import RowGroup, refuse_trees
from ds_ring.patterns.documents.pattern import Documents
from ds_ring.patterns.private.pattern import BlockDiffusion
from tests.dist.deepspeed_ranks import (
    VOCABULARY,
    Size,
    build_model,
    json_config,
    start_engine,
    take_step,
    train_by_sgd,
)
from tests.unit.patterns.private import masks

SIZE, CLEAN, BLOCK = Size(hidden=32, layers=2, tokens=0, samples=2), 45, 6
MASK = VOCABULARY - 1
IDS = np.repeat([0, 1, 4], [20, 14, 11])


def texts(step: int) -> tuple[Tensor, Tensor]:
    """Clean and corrupted ids; about half of the tokens are masked."""
    drawn = torch.Generator().manual_seed(step)
    clean = torch.randint(0, MASK, (SIZE.samples, CLEAN), generator=drawn)
    return clean, clean.masked_fill(torch.rand(clean.shape, generator=drawn) < 0.5, MASK)


def alone(steps: int, ids: np.ndarray | None) -> list[float]:
    """transformers' own attention with the paper's mask, labels not shifted."""
    model = build_model(SIZE, "sdpa")
    seen = torch.from_numpy(masks.block_diffusion(BLOCK, CLEAN, ids))[None, None]
    local = np.zeros(CLEAN, dtype=int) if ids is None else ids
    places = torch.tensor([int((local[:t] == local[t]).sum()) for t in range(CLEAN)]).repeat(1, 2)

    def loss_of(step: int) -> Tensor:
        clean, corrupted = texts(step)
        logits = model(torch.cat([clean, corrupted], 1), seen, places).logits[:, CLEAN:]
        return torch.nn.functional.cross_entropy(logits.mT, clean.masked_fill(clean == corrupted, IGNORE))

    return train_by_sgd(model.parameters(), loss_of, steps)


def on_ring(
    rank: int, world_size: int, steps: int, ids: np.ndarray | None, ulysses: int
) -> tuple[list[float], str]:
    section = {"layout": "private", "ulysses_size": ulysses}
    config = json_config(world_size, SIZE.samples, 1, ring_attention=section)
    engine = start_engine(build_model(SIZE, "sdpa"), config)
    documents = None if ids is None else torch.from_numpy(ids)
    losses = []
    for step in range(steps):
        batch = engine.ring.diffusion_batch(*texts(step), BLOCK, document_ids=documents)
        losses.append(take_step(engine, batch))
    layout = engine.ring.batches.current.layout
    return losses, layout.name


@pytest.mark.day("4-2-3-True")
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("world", "ulysses", "steps"), [(2, 1, 50), (4, 1, 50), (2, 1, 3), (2, 2, 3), (4, 2, 3)]
)
def test_steps_have_the_losses_of_one_process(
    rank_pool: Any, world: int, ulysses: int, steps: int, packed: bool
) -> None:
    ids = IDS if packed else None
    want = alone(steps, ids)
    for losses, layout in rank_pool(world).run(on_ring, steps, ids, ulysses):
        assert layout == "private"
        assert max(abs(a - b) for a, b in zip(losses, want, strict=True)) < 1e-5


@pytest.mark.parametrize("ids", [None, IDS, IDS[:1].repeat(45)])
def test_the_blocks_of_a_row_are_read_again(ids: np.ndarray | None) -> None:
    batch = diffusion_batch(
        None, *texts(0), BLOCK, document_ids=None if ids is None else torch.from_numpy(ids)
    )  # type: ignore[arg-type]
    row = np.append(batch[BLOCKS][0].numpy(), [0, 0])
    pattern, at = DiffusionRows().make_row_pattern(row), np.arange(92)
    seen = masks.block_diffusion(BLOCK, CLEAN, ids, padding=2)
    assert np.array_equal(pattern.multiplicity(0, 1, 1, at[:, None], at[None]), seen)
    assert pattern.pairs >= seen.sum()


@pytest.mark.parametrize(
    "row", [[1, 1, -1], [1, 2, -1, -1], [0, 0], [1, 1, 2, 2, 2, -1, -1, -2, -2, -2], [2, -2]]
)
def test_numbers_that_are_no_blocks_are_refused(row: list[int]) -> None:
    with pytest.raises(RingPatternError, match=BLOCKS):
        DiffusionRows().make_row_pattern(np.array(row))


def test_wrong_batches_are_refused() -> None:
    clean, corrupted = texts(0)
    with pytest.raises(RingShapeError, match="both"):
        diffusion_batch(None, clean, corrupted[:, :-1], BLOCK)  # type: ignore[arg-type]
    with pytest.raises(RingPatternError, match="ids that rise"):
        diffusion_batch(None, clean, corrupted, BLOCK, document_ids=torch.arange(CLEAN).flip(0))  # type: ignore[arg-type]
    with pytest.raises(RingPatternError, match="diffusion_batch: block"):
        diffusion_batch(None, clean, corrupted, 0)  # type: ignore[arg-type]
    group = RowGroup(BlockDiffusion(2, 8), (0,))
    assert group.along_paths(None) is None
    with pytest.raises(RingPatternError, match="no ALiBi with BlockDiffusion"):
        group.along_paths(Alibi(torch.ones(4)))
    with pytest.raises(RingPatternError, match="a layer: expected softmax attention"):
        refuse_trees([group])
    assert make_block_numbers(BlockDiffusion(2, 3, Documents([0, 0, 1]))).tolist() == [1, 1, 3, -1, -1, -3]
