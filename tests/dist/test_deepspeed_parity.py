"""A ring under DeepSpeed trains as one process does: every loss and every gradient, at every ZeRO stage.

SGD and no clipping: Adam and clipping hide a wrong gradient scale. Each parameter's gradient is compared by
itself: an average over parameters would hide a wrong one.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest

from tests.dist.deepspeed_ranks import Run, Size, check_gradients, json_config, train_alone, train_on_ring
from tests.machine import skip_without

STEPS = 3
EVEN = Size(hidden=32, layers=2, tokens=64, samples=2)
RAGGED = Size(hidden=48, layers=2, tokens=83, samples=4)

# (ranks in the world, ranks in a ring)
MESHES = {"ring2": (2, 2), "ring4": (4, 4), "data2xring2": (4, 2)}
LAYOUTS = {EVEN: "auto", RAGGED: "striped"}


@lru_cache(maxsize=8)
def alone(size: Size, micro_batches: int = 1) -> Run:
    return train_alone(size, STEPS, micro_batches)


def check_parity(
    got: list[Run], expected: Run, loss_error: float = 1e-5, gradient_error: float = 1e-4
) -> None:
    """Losses of every rank and step, and each parameter's gradient by itself."""
    for rank, run in enumerate(got):
        assert run.losses == pytest.approx(expected.losses, rel=loss_error), f"losses of rank {rank}"
    check_gradients(got[0].gradients, expected.gradients, gradient_error)


@pytest.mark.parametrize(
    ("stage", "size"),
    [(0, RAGGED), (1, EVEN), (1, RAGGED), (2, RAGGED), (3, EVEN), (3, RAGGED)],
    ids=lambda value: f"zero{value}" if isinstance(value, int) else f"T{value.tokens}",
)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.covering(1)
def test_training_equals_one_process(rank_pool, mesh, stage, size):
    world, ring = MESHES[mesh]
    config = json_config(ring, size.samples * ring // world, stage, ring_attention={"layout": LAYOUTS[size]})
    runs = rank_pool(world).run(train_on_ring, size, config, STEPS, timeout_s=120)
    check_parity(runs, alone(size))


# Ranks of the ring, and what is added to the JSON. Accumulation averages the means of micro-batches, as DeepSpeed does.
VARIANTS: dict[str, tuple[int, dict[str, Any]]] = {
    "zero3 without reduce_scatter": (2, {"zero_optimization": {"stage": 3, "reduce_scatter": False}}),
    "zero3 in small buckets": (2, {"zero_optimization": {"stage": 3, "reduce_bucket_size": 500}}),
    "summed gradients": (2, {"gradient_allreduce_op": "sum"}),
    "summed gradients, zero2": (2, {"gradient_allreduce_op": "sum", "zero_optimization": {"stage": 2}}),
    "prescaled gradients": (2, {"prescale_gradients": True, "gradient_predivide_factor": 4.0}),
    "all_gather": (2, {"ring_attention": {"transport": "all_gather"}}),
    "short batches": (2, {"ring_attention": {"min_sequence_length": RAGGED.tokens + 1}}),
    "just not short": (2, {"ring_attention": {"min_sequence_length": RAGGED.tokens}}),
    "Ulysses, zero1": (4, {"ring_attention": {"ulysses_size": 2}, "zero_optimization": {"stage": 1}}),
    "Ulysses, zero3": (4, {"ring_attention": {"ulysses_size": 2}, "zero_optimization": {"stage": 3}}),
    "accumulation": (2, {"gradient_accumulation_steps": 2}),
    "accumulation, zero3": (2, {"gradient_accumulation_steps": 2, "zero_optimization": {"stage": 3}}),
}


@pytest.mark.day(
    "summed gradients, zero2", "prescaled gradients", "short batches", "Ulysses, zero3", "accumulation, zero3"
)
@pytest.mark.parametrize("variant", VARIANTS)
def test_settings_that_could_change_the_scale(rank_pool, variant):
    ranks, changes = VARIANTS[variant]
    micro_batches = changes.get("gradient_accumulation_steps", 1)
    config = json_config(ranks, RAGGED.samples // micro_batches, 0, **changes)
    got = rank_pool(ranks).run(train_on_ring, RAGGED, config, STEPS)
    check_parity(got, alone(RAGGED, micro_batches))


@pytest.mark.parametrize("ring", [2, 4])
@pytest.mark.day("4")
def test_a_short_batch_whose_samples_do_not_divide(rank_pool, ring):
    """Three samples on two or four ranks: each takes whole ones, and the rows left over count nothing."""
    size = Size(hidden=32, layers=1, tokens=24, samples=3)
    config = json_config(ring, size.samples, 2, ring_attention={"min_sequence_length": 25})
    check_parity(rank_pool(ring).run(train_on_ring, size, config, 3), train_alone(size, 3))


@pytest.mark.night
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_low_precision_keeps_the_scale(rank_pool, precision):
    """fp16 with a loss scale of 256: the engine scales the loss, and divides it out again."""
    settings = {"enabled": True} | ({"loss_scale": 256} if precision == "fp16" else {})
    config = json_config(2, EVEN.samples, 1, **{precision: settings})
    runs = rank_pool(2).run(train_on_ring, EVEN, config, 3)
    check_parity(runs, alone(EVEN), loss_error=1e-2, gradient_error=5e-2)


def train_without_fp16(rank, world_size, *arguments):
    """As on a processor with avx512_bf16 and without avx512_fp16."""
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: None  # its very answer there
    return train_on_ring(rank, world_size, *arguments)


def test_a_processor_without_fp16_skips_with_the_reason(rank_pool):
    config = json_config(2, EVEN.samples, 1, fp16={"enabled": True, "loss_scale": 256})
    with pytest.raises(pytest.skip.Exception, match="this processor has no fp16"):
        rank_pool(2).run(train_without_fp16, EVEN, config, 3)
    skip_without("fp16")
    rank_pool(2).run(train_on_ring, EVEN, config, 1)  # not on the same ranks


def test_gradient_checkpointing_on_the_ring(rank_pool):
    config = json_config(2, EVEN.samples, 1)
    runs = rank_pool(2).run(train_on_ring, EVEN, config, STEPS, checkpointing=True)
    check_parity(runs, alone(EVEN))


@pytest.mark.parametrize("stage", [0, 1, 2, 3], ids=lambda stage: f"zero{stage}")
@pytest.mark.day("zero0", "zero3")
def test_a_wrong_scale_fails(rank_pool, stage):
    """The comparison above must see a loss that is divided by the ring size once too often."""
    runs = rank_pool(2).run(train_on_ring, EVEN, json_config(2, EVEN.samples, stage), 2, wrong_scale=0.5)
    expected = alone(EVEN)._replace(losses=runs[0].losses)
    with pytest.raises(AssertionError, match="relative error 5"):
        check_parity(runs, expected)
