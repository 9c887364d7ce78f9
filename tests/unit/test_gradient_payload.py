"""dK and dV that travel in bfloat16: the error by ring size, and the bytes, with virtual ranks."""

from __future__ import annotations

import pytest

from ds_ring import Causal, Dilated, build_plan, make_layout, simulate
from ds_ring.masks.pattern import Pattern
from ds_ring.schedule.lowering import lower_pass
from ds_ring.schedule.steps import Payload, Send
from ds_ring.simulation.simulate import SimulationOptions
from tests.cases import Shape, tensors
from tests.reference import dense_attention

SHAPE = Shape(batch=1, query_heads=2, kv_heads=1, tokens=512, head_dim=32)
MAX_RATIO = 1.5  # times the error of one rank


def errors(pattern: Pattern, layout_name: str, ring_size: int, payload: str) -> dict[str, float]:
    """Of dk and dv, relative to float64 for the same bfloat16 inputs."""
    q, k, v, grad = (x.bfloat16() for x in tensors(SHAPE))
    layout = make_layout(layout_name, tokens=SHAPE.tokens, ring_size=ring_size, pattern=pattern)
    found = simulate(
        q,
        k,
        v,
        pattern=pattern,
        layout=layout,
        grad_out=grad,
        measure_memory=False,
        options=SimulationOptions(gradient_payload=payload),
    )
    exact = dense_attention(*(x.double() for x in (q, k, v, grad)), pattern)
    return {
        name: float((getattr(found, name).double() - wanted).norm() / wanted.norm())
        for name, wanted in (("dk", exact.dk), ("dv", exact.dv))
    }


@pytest.mark.parametrize(
    ("pattern", "layout_name", "sizes"),
    [
        (Causal(), "zigzag", (2, 16)),
        (Causal(), "zigzag", (64,)),
        (Dilated((64, 256, 512), (1, 2, 4)), "contiguous", (64,)),
    ],
    ids=["causal", "causal on 64 ranks", "LongNet on 64 ranks"],
)
@pytest.mark.day("causal")
def test_the_error_stays_near_that_of_one_rank(
    pattern: Pattern, layout_name: str, sizes: tuple[int, ...]
) -> None:
    alone = errors(pattern, layout_name, 1, "float32")
    for size in sizes:
        for name, error in errors(pattern, layout_name, size, "bfloat16").items():
            assert alone[name] < error < MAX_RATIO * alone[name], (size, name, error / alone[name])


def units(payload: str, backward: bool) -> tuple[int, int]:
    """Bytes that 8 ranks send, in those of a shard's K and V, and their messages."""
    layout = make_layout("zigzag", tokens=8 * 64, ring_size=8)
    plan = build_plan(Causal(), layout, gradient_payload=payload)
    sizes = {Payload.KEYS: 1.0, Payload.GRADIENTS: 2.0, Payload.ROUNDED: 1.0}
    total = messages = 0
    for rank in range(8):
        schedule = lower_pass(plan.rank(rank).classes, 1, backward=backward)
        for steps in schedule.chunks[0].steps.rounds:
            for post in steps.posted:
                if isinstance(post, Send):
                    total += int((post.slots[:, 1] - post.slots[:, 0]).sum()) * sizes[post.payload]
                    messages += 1
    return int(total) // 64, messages


def test_two_thirds_of_the_bytes_in_as_many_messages() -> None:
    """Of all eight ranks: K and V 42 shards; backward again with dK and dV, twice their size in float32."""
    assert units("float32", False)[0] == units("bfloat16", False)[0] == 42
    assert (units("float32", True)[0], units("bfloat16", True)[0]) == (42 + 84, 42 + 42)


def test_every_part_is_rounded_once() -> None:
    """No sum that was rounded is handed on: what a rank sends home is its own part of the gradients."""
    plan = build_plan(Causal(), make_layout("zigzag", tokens=512, ring_size=8), gradient_payload="bfloat16")
    for rank in range(8):
        (chunk,) = lower_pass(plan.rank(rank).classes, 1, backward=True).chunks
        sends = [post for steps in chunk.steps.rounds for post in steps.posted if isinstance(post, Send)]
        gradients = [post for post in sends if post.payload is not Payload.KEYS]
        assert gradients and all(
            post.payload is Payload.ROUNDED and post.peer == post.origin for post in gradients
        )
