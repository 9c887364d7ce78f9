"""Random sequences of calls of one compiled function, on ranks: equal to eager, or refused by name.

Owns a round of `tools/campaign.py compile`. A round is drawn from its seed, on all ranks alike: a backend, and
calls in which one or several things change: the pattern, the layout, the mesh, the scale, sinks, lengths, the
documents, and what mask and score functions captured, by other functions or by writes.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ds_ring import (
    Causal,
    Documents,
    Full,
    MaskMod,
    RingError,
    RingMesh,
    SlidingWindow,
    make_layout,
    ring_attention,
)

BACKENDS = ("eager", "aot_eager", "inductor")
TOKENS, HEADS, WIDTH, CALLS = 16, 4, 8, 4
TOLERANCE = 1e-9  # of float64


class Found(NamedTuple):
    """What became of a round: calls that were equal and refused, and what was wrong."""

    equal: int
    refused: list[str]
    wrong: list[str]


class Captured:
    """What functions capture, and what is written to between calls."""

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self.numbers = [0.5]
        self.table = torch.linspace(-1, 1, 2 * TOKENS, dtype=torch.float64)
        self.ids = torch.arange(2 * TOKENS) // 5

    def write(self) -> None:
        """Change a captured value in place, counted by torch or not."""
        number = self.draw.choice((0.5, 2.0, -1.0))
        self.draw.choice(
            (
                lambda: self.numbers.__setitem__(0, number),
                lambda: self.table.mul_(number),
                lambda: self.table.data.mul_(number),
                lambda: self.table.numpy().__imul__(number),
                lambda: self.ids.copy_(torch.arange(2 * TOKENS) // self.draw.choice((3, 7))),
                lambda: None,
            )
        )()

    def score(self) -> Any:
        """Return a score function, or None."""
        x, table, numbers = self.draw.choice((0.2, 0.7, 1.5)), self.table, self.numbers
        fresh = table * x
        functions: tuple[Any, ...] = (
            None,
            lambda s, b, h, q, k: s + x * (q - k),
            lambda s, b, h, q, k, x=x: s + x * h * (q - k),
            lambda s, b, h, q, k: s + table[k],
            lambda s, b, h, q, k: s + fresh[k],
            lambda s, b, h, q, k: s + numbers[0] * (k - q),
            partial(lambda x, s, b, h, q, k: s - x * (q - k), x),
        )
        return self.draw.choice(functions)

    def mask(self) -> Any:
        """Return a mask function."""
        width, ids = self.draw.choice((3, 6, 9)), self.ids
        fresh = ids // self.draw.choice((1, 2))
        functions: tuple[Any, ...] = (
            lambda b, h, q, k: q - k < width,
            lambda b, h, q, k, width=width: q - k < width + h,
            lambda b, h, q, k: ids[q] == ids[k],
            lambda b, h, q, k: fresh[q] == fresh[k],
        )
        return self.draw.choice(functions)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    how: str,
    function: Any,
    number: Any,
    where: dict[str, Any],
) -> Tensor:
    """Attend by a pattern and functions that come from outside, or are made here; compiled, and eagerly."""
    where, pattern = dict(where), where["pattern"]
    if how == "mask":
        where["pattern"] = MaskMod(function) & Causal()
        function = None
    elif how == "number inside":
        function = lambda s, b, h, q, k: s + number * (q - k)  # noqa: E731
    elif how == "tensor inside":
        function = lambda s, b, h, q, k: s + number[k]  # noqa: E731
    elif how == "mask inside":
        where["pattern"] = MaskMod(lambda b, h, q, k: (q - k) * number < 3) & pattern
    elif how == "computed inside":
        local = number * 2
        function = lambda s, b, h, q, k: s + local[k]  # noqa: E731
    return ring_attention(q, k, v, sinks=sinks, score_mod=function, **where)


def _gradients(
    function: Callable[..., Tensor], inputs: list[Tensor], sinks: Tensor | None, *arguments: Any
) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in inputs]
    sink = None if sinks is None else sinks.clone().requires_grad_()
    out = function(*leaves, sink, *arguments)
    (out * torch.linspace(0.5, 1.5, out.shape[-1], dtype=out.dtype)).sum().backward()
    return [out.detach(), *(x.grad for x in (*leaves, sink) if x is not None and x.grad is not None)]


def play(rank: int, world_size: int, seed: int, backend: str) -> Found:
    """Play the round of a seed."""
    torch._dynamo.reset()
    draw = random.Random(seed)
    captured = Captured(draw)
    meshes = [RingMesh.from_world(world_size), RingMesh.single(), RingMesh.from_world(1, world_size)]
    compiled = torch.compile(_attend, fullgraph=True, backend=backend)
    equal, refused, wrong = 0, [], []
    for step in range(CALLS):
        captured.write()
        tokens, mesh = draw.choice((TOKENS, TOKENS, 2 * TOKENS)), draw.choice(meshes)
        layout = make_layout(draw.choice(("zigzag", "contiguous")), tokens=tokens, ring_size=mesh.ring_size)
        ids = torch.arange(tokens) // draw.choice((4, 7))
        pattern = draw.choice((Causal(), Full(), SlidingWindow(draw.choice((2, 5))), Documents(ids)))
        where = {"pattern": pattern, "layout": layout, "mesh": mesh, "scale": draw.choice((None, 0.5, 1.5))}
        how = draw.choice(
            ("given", "given", "mask", "number inside", "tensor inside", "mask inside", "computed inside")
        )
        function = captured.mask() if how == "mask" else captured.score()
        number = captured.table if "tensor" in how or "computed" in how else draw.choice((0.4, 1.0, 2, 3))
        generator = torch.Generator().manual_seed(97 * seed + step + (rank if mesh.sequence_size > 1 else 0))
        slots = tokens // mesh.sequence_size
        sizes = [(2, heads, slots, WIDTH) for heads in (HEADS, 2, 2)]
        inputs = [torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes]
        # their gradient takes Inductor's C++ compiler half a minute
        sinks = torch.linspace(-1, 1, HEADS, dtype=torch.float64) if draw.random() < 0.3 else None
        sinks = None if backend == "inductor" else sinks
        arguments = (how, function, number, where)
        said = f"seed {seed}, call {step}: {how}, {pattern}, {layout}, {mesh}"
        want = _gradients(_attend, inputs, sinks, *arguments)
        try:
            got = _gradients(compiled, inputs, sinks, *arguments)
        except RingError as error:
            refused.append(f"{type(error).__name__}: {error}")
            continue
        except Exception as error:
            wrong.append(f"{said}: raw {type(error).__name__}: {error}"[:600])
            break
        off = max(float((a - b).abs().max()) for a, b in zip(got, want, strict=True))
        if off > TOLERANCE:
            wrong.append(f"{said}: off by {off:.3g}")
        else:
            equal += 1
    return Found(equal, refused, wrong)
