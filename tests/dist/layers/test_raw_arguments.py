"""Arguments that ended in raw errors: refused by name on every rank, after which the ring goes on, or right."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ds_ring import (
    Causal,
    Documents,
    PassOptions,
    RingAttention,
    RingMesh,
    Tree,
    halo,
    make_layout,
    moba_attention,
    ring_attention,
    shift_sequence,
)
from tests.dist.harness import Pool, catch_refusals

T = 16


def refused(rank: int, world_size: int) -> dict[str, str]:
    """What each call raises; "" for none. Afterwards the mesh is in use again."""
    mesh = RingMesh.from_world(world_size)
    layout = make_layout("contiguous", tokens=T, ring_size=world_size)
    place: dict[str, Any] = {"layout": layout, "mesh": mesh}
    slots = layout.local_tokens
    x, q = torch.randn(2, slots, 3), torch.randn(1, 2, slots, 8)
    documents: dict[str, Any] = {
        "a list": [0] * T, "a tensor": torch.zeros(T, dtype=torch.int64), "both": Documents([0] * T) & Causal(),
    }  # fmt: skip
    calls: dict[str, Callable[[], Any]] = {}
    for name, item in documents.items():
        calls[f"halo of {name}"] = lambda item=item: halo(x, 1, dim=1, documents=item, **place)
        calls[f"MoBA of {name}"] = lambda item=item: moba_attention(
            q, q, q, block_size=4, top_k=2, documents=item, **place
        )
    tree: Any = Tree((-1, 0), (8, 8))
    calls["MoBA of a tree"] = lambda: moba_attention(q, q, q, block_size=4, top_k=2, documents=tree, **place)
    for offset in (True, "1", 1.0):
        wrong: Any = offset
        calls[f"offset {offset!r}"] = lambda wrong=wrong: shift_sequence(x, wrong, dim=1, **place)
    module = RingAttention(Causal(), **{"mesh": mesh, "layout": layout})
    calls["torch.save"] = lambda: torch.save(module, io.BytesIO())
    result = catch_refusals(calls)
    sinks = torch.tensor([0.5, -torch.inf])
    checked = ring_attention(
        q, q, q, pattern=Causal(), sinks=sinks, options=PassOptions(check_finite=True), **place
    )
    plain = ring_attention(q, q, q, pattern=Causal(), sinks=sinks, **place)
    result["a sink of -inf"] = "" if torch.equal(checked, plain) and bool(plain.isfinite().all()) else "off"
    return result


@pytest.mark.situation(
    "inputs", "documents= as a list, a tensor or a composed pattern; offset=True; torch.save"
)
def test_arguments_are_refused_by_name(rank_pool: Pool) -> None:
    for result in rank_pool(2).run(refused):
        assert result.pop("a sink of -inf") == ""
        for name, said in result.items():
            kind = {"offset": "RingShapeError: shift_sequence: offset", "torch.": "RingMeshError: RingMesh"}
            assert said.startswith(kind.get(name[:6], "RingPatternError: documents: expected")), (name, said)
