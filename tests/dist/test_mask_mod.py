"""`MaskMod` on real ranks: FlexAttention's masks on every kernel and layout, and functions that differ."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ds_ring import Causal, MaskMod, RingAttention, RingMesh
from ds_ring.ops.options import Options
from tests import calls
from tests.cases import LAYOUTS, Shape, tensors
from tests.dist.harness import Pool, catch_refusal
from tests.dist.test_patterns import NAMES, run_ring
from tests.dist.test_wrong_inputs import Refusal, attend, check_refusal, outcomes, refusal, right_arguments
from tests.masks import COMPOSED, MASKS, MaskFunction, attention_by_mask, causal, patterns

KERNELS = ("cpu", "reference")
RINGS = (1, 2, 3)
TURNS = -(-len(LAYOUTS) // len(RINGS))  # so that every mask meets every layout


def cases(world_size: int) -> list[tuple[str, str, str, str]]:
    """Mask, composition, layout and kernel: every mask meets every layout on both kernels over the rings."""
    result = []
    for number, mask in enumerate(MASKS):
        for turn in range(TURNS):
            layout = LAYOUTS[(number + turn * len(RINGS) + world_size) % len(LAYOUTS)]
            composed = list(COMPOSED)[(number + turn + world_size) % len(COMPOSED)]
            result.append((mask, composed, layout, KERNELS[(number + turn + world_size) % 2]))
    return result


def errors(rank: int, world_size: int, turn: int) -> dict[tuple[str, ...], float]:
    mesh, result = RingMesh.from_world(world_size), {}
    for number, (mask, composed, layout, kernel) in list(enumerate(cases(world_size)))[turn::TURNS]:
        heads, kv_heads = ((4, 2), (4, 4), (8, 2))[number % 3]
        tokens = 64 if mask == "natten" else 24 if layout == "residue" else (90, 270)[number % 4 == 1]
        shape = Shape(2, heads, kv_heads, tokens, head_dim=8)
        pattern, truth = patterns(mask, composed, shape.tokens)
        options = Options(kernel=kernel, transport="all_gather" if number % 7 == 0 else "ring")
        got = run_ring(mesh, pattern, layout, shape, torch.float64, options=options)
        if rank == 0:
            want = attention_by_mask(shape, truth)
            sees = want.lse.isfinite()
            assert torch.equal(got.lse.isfinite(), sees), (mask, composed, layout)
            assert got.out[~sees].eq(0).all() and got.dq[~sees].eq(0).all(), (mask, composed, layout)
            pairs = [(getattr(got, name), getattr(want, name)) for name in NAMES]
            pairs.append((got.lse[sees], want.lse[sees]))
            worst = max(float((a - b).abs().max()) for a, b in pairs)
            result[mask, composed, layout, kernel] = worst
    return result


@pytest.mark.parametrize("turn", range(TURNS))
@pytest.mark.parametrize("ring_size", RINGS)
@pytest.mark.day("1-0")  # test_registry.py and test_patterns.py have such masks on rings by day
def test_masks_of_flex_attention_are_exact(rank_pool: Pool, ring_size: int, turn: int) -> None:
    result = rank_pool(ring_size).run(errors, turn, timeout_s=300)[0]
    assert len(result) == len(MASKS)
    worst = max(result, key=result.__getitem__)
    assert result[worst] < 1e-12, (worst, result[worst])


def test_the_table_of_cases_is_complete() -> None:
    every = [case for ring_size in RINGS for case in cases(ring_size)]
    assert {(mask, layout) for mask, _, layout, _ in every} == set(itertools.product(MASKS, LAYOUTS))
    assert {(mask, kernel) for mask, *_, kernel in every} == set(itertools.product(MASKS, KERNELS))


# --- functions that differ between ranks, and functions that are no masks -----------------------------


def within(size: object) -> MaskFunction:
    return lambda b, h, q, k: q - k <= size


def one_of(ids: torch.Tensor) -> MaskFunction:
    return lambda b, h, q, k: ids[q] == ids[k]


SIXTY_FOUR = torch.arange(64) // 8
DIFFERENT: dict[str, tuple[MaskFunction, MaskFunction]] = {
    "two lambdas": (lambda b, h, q, k: q >= k, lambda b, h, q, k: q > k),
    "one number": (within(5), within(6)),
    "a number in a tensor": (within(torch.tensor(5)), within(torch.tensor(6))),
    "one document id": (one_of(SIXTY_FOUR), one_of(torch.where(SIXTY_FOUR == 7, 6, SIXTY_FOUR))),
    "a head": (lambda b, h, q, k: (q >= k) & (h == 0), lambda b, h, q, k: (q >= k) & (h == 1)),
}
LOG: list[int] = []


def no_answer(b: object, h: object, q: object, k: object) -> None:
    LOG.append(1)


def random_mask(b: object, h: object, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return torch.rand((), device=q.device) > 0.5


def throws_dice(b: object, h: object, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return q % 2 >= k - k + random.randrange(2)


def counts(b: object, h: object, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    SIXTY_FOUR.add_(0)
    return q >= k


def grows(b: object, h: object, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    LOG.append(1)
    return q >= k + len(LOG)


NO_MASKS: dict[str, tuple[MaskFunction, tuple[str, ...]]] = {
    "returns nothing": (no_answer, ("no_answer: expected a boolean tensor", "got NoneType")),
    "returns a score": (lambda b, h, q, k: q - k, ("expected a boolean tensor", "got torch.int64")),
    "returns True": (lambda b, h, q, k: True, ("expected a boolean tensor", "got bool")),
    "returns a vector": (lambda b, h, q, k: q >= torch.arange(3), ("got torch.bool of shape (3,)",)),
    "raises": (lambda b, h, q, k: q.nothing, ("got AttributeError", "mask_mod")),
    "takes three": (lambda q, k: q >= k, ("got TypeError", "mask_mod(batch, head, q_position, k_position)")),
    "branches": (lambda b, h, q, k: q >= k if q > 5 else k >= q, ("got RuntimeError", "0-d tensors")),
    "draws": (random_mask, ("a mask without random numbers", "aten.rand")),
    "draws in Python": (throws_dice, ("expected a mask",)),
    "writes": (counts, ("writes to no tensor but its own", "aten.add_")),
    "is another one each time": (grows, ("a mask that is the same at every call",)),
    "knows too few documents": (one_of(SIXTY_FOUR[:50]), ("a mask of positions up to 63", "IndexError")),
    "knows too few heads": (
        lambda b, h, q, k: q - k <= SIXTY_FOUR[:5][h],
        ("a mask of positions up to 63", "IndexError"),
    ),
    "knows other samples": (
        lambda b, h, q, k: SIXTY_FOUR.view(8, 8)[b, q % 8] >= k,
        ("a table with one row for each of this rank's", "got 8 rows", "engine.ring.gather"),
    ),
}


def call_with_masks(rank: int, world_size: int, table: str, name: str, wrong_ranks: int) -> Refusal:
    """An attention whose mask is a row of DIFFERENT, or, on the last so many ranks, of NO_MASKS."""
    mesh = RingMesh.from_world(world_size)
    wrong = rank >= world_size - wrong_ranks
    row = DIFFERENT[name][min(rank, 1)] if table == "DIFFERENT" else NO_MASKS[name][0] if wrong else causal
    return refusal(lambda: attend(right_arguments(mesh) | {"pattern": MaskMod(row)}), mesh)


@pytest.mark.day("one document id")
@pytest.mark.situation("masks", "ranks have different mask functions")
@pytest.mark.parametrize("name", DIFFERENT)
def test_different_masks_on_two_ranks_are_named_on_every_rank(rank_pool: Pool, name: str) -> None:
    says = ("pattern: ring rank 0 has MaskMod(tests.dist.test_mask_mod.", ", contents ", "ring rank 1 ")
    for result in outcomes(rank_pool(3), call_with_masks, "DIFFERENT", name, 0):
        check_refusal(result, "RingMismatchError", says)


@pytest.mark.parametrize("name", NO_MASKS)
@pytest.mark.day("returns nothing", "branches", "draws", "knows too few documents", "knows other samples")
def test_what_is_no_mask_ends_in_a_typed_error_on_every_rank(rank_pool: Pool, name: str) -> None:
    for wrong_ranks in (1, 2):
        for rank, result in enumerate(outcomes(rank_pool(2), call_with_masks, "NO_MASKS", name, wrong_ranks)):
            wrong = rank >= 2 - wrong_ranks
            says = NO_MASKS[name][1] if wrong else ("ring rank 1 refused its own input", *NO_MASKS[name][1])
            check_refusal(result, "RingPatternError" if wrong else "RingMismatchError", says)


def changed_masks(rank: int, world_size: int, what: str) -> Refusal:
    """What a mask captured is changed after its first use."""
    mesh, ids, size = RingMesh.from_world(world_size), SIXTY_FOUR.clone(), 9
    pattern = MaskMod(lambda b, h, q, k: (ids[q] == ids[k]) & (q - k <= size))
    inputs = right_arguments(mesh) | {"pattern": pattern}
    function, rest = calls.function_of({x: inputs[x] for x in ("pattern", "layout", "mesh")})
    attends: Callable[..., torch.Tensor] = functools.partial(function, **rest)
    if "module" in what:
        attends = RingAttention(pattern, mesh=mesh, layout=inputs["layout"])
    if "compiled" in what:
        attends = torch.compile(attends, backend="eager", fullgraph=True)

    def call() -> torch.Tensor:
        return attends(*(inputs[x] for x in "qkv"))

    call()
    if "tensor" in what:
        ids[0] = 3
    else:
        size = 8
    return refusal(call, mesh)


@pytest.mark.situation("masks", "what a mask captured has changed since it was made")
@pytest.mark.parametrize(
    "what", ["tensor", "number", "tensor, by a module", "number, by a module", "tensor, compiled"]
)
@pytest.mark.day("tensor", "tensor, by a module", "tensor, compiled")
def test_a_mask_that_was_changed_is_refused(rank_pool: Pool, what: str) -> None:
    for result in outcomes(rank_pool(2), changed_masks, what):
        check_refusal(
            result,
            "RingPatternError",
            ("unchanged captured values", "give each call of ring_attention a new MaskMod"),
        )


def batches_in_one_buffer(rank: int, world_size: int) -> list[bool]:
    """Whether each batch attends as with ids of its own; the ids of all lie in one tensor."""
    mesh, buffer = RingMesh.from_world(world_size), torch.zeros(64, dtype=torch.int64)
    result = []
    for width in (8, 5, 8):
        buffer.copy_(torch.arange(64) // width)
        got = attend(right_arguments(mesh) | {"pattern": MaskMod(one_of(buffer))})
        want = attend(right_arguments(mesh) | {"pattern": MaskMod(one_of(torch.arange(64) // width))})
        result.append(torch.equal(got, want))
    return result


@pytest.mark.situation("masks", "document ids of each batch in one buffer")
def test_ids_of_the_next_batch_in_the_same_buffer_are_attended(rank_pool: Pool) -> None:
    assert rank_pool(2).run(batches_in_one_buffer) == [[True] * 3] * 2


def learned_bias(rank: int, world_size: int) -> Refusal:
    """A score_mod that reads a parameter, on the last rank."""
    mesh, bias = RingMesh.from_world(world_size), torch.ones(8, requires_grad=rank == world_size - 1)
    mod = {"score_mod": lambda score, b, h, q, k: score + bias[h], "kernel": "reference"}
    return refusal(lambda: attend(right_arguments(mesh) | mod), mesh)


def test_a_captured_parameter_is_refused_on_every_rank(rank_pool: Pool) -> None:
    first, last = outcomes(rank_pool(2), learned_bias)
    says = ("captured tensors that require no gradient", "detach it")
    check_refusal(last, "RingConfigError", says)
    check_refusal(first, "RingMismatchError", ("ring rank 1 refused its own input", says[0]))


SHORT: dict[str, Callable[..., Any]] = {
    "by query": lambda table, s, b, h, q, k: s + table[q],
    "by key": lambda table, s, b, h, q, k: s + table[k],
    "by distance": lambda table, s, b, h, q, k: s + table[(q - k).abs()],
    "by head": lambda table, s, b, h, q, k: s + table[h * 16],
    "by sample": lambda table, s, b, h, q, k: s + table[b * 31],
}


def short_tables(rank: int, world_size: int, name: str, queries: str) -> tuple[str, bool]:
    """What a score_mod with a table of 31 entries for 32 positions raises; whether the mesh works afterwards."""
    mesh = RingMesh.from_world(world_size)
    q, k, v, _ = tensors(Shape(batch=2, query_heads=4, kv_heads=2, tokens=32 // world_size), seed=rank)
    table = torch.zeros(31)
    where: dict[str, Any] = {"pattern": Causal(), "layout": "zigzag", "mesh": mesh, "queries": queries}
    if queries == "replicated":
        q = tensors(Shape(batch=2, query_heads=4, tokens=3))[0]
    result = catch_refusal(calls.attend, q, k, v, score_mod=functools.partial(SHORT[name], table), **where)
    out = calls.attend(q, k, v, **where)
    return result, bool(out.isfinite().all())


@pytest.mark.day("sharded-by query")
@pytest.mark.situation("operators", "the table of a score_mod is shorter than the sequence")
@pytest.mark.parametrize("name", SHORT)
@pytest.mark.parametrize("queries", ["sharded", "replicated"])
def test_a_table_that_is_too_short_is_refused_on_all_ranks(rank_pool: Pool, name: str, queries: str) -> None:
    for result, works in rank_pool(2).run(short_tables, name, queries):
        assert works
        assert result.startswith("RingConfigError: score_mod") and "IndexError" in result, result
