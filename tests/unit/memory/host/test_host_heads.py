"""Attention's tensors on the host between its passes: what is freed, what is right, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import ds_ring
from ds_ring import build_plan, make_layout
from ds_ring.memory.host.head_stream import HeadStream
from ds_ring.memory.host.host_memory import HostMemory
from ds_ring.ops.context import make_ring_context
from ds_ring.ops.options import Options
from ds_ring.ops.ring_op import ring_attention_op
from ds_ring.ring.ring_pass import RingPass
from ds_ring.schedule.lowering import LONG_SHARD, heads_on_host, lower_rank
from tests.one_rank import one_rank_mesh
from tests.reference import dense_attention

B, H, G, S, D = 2, 4, 2, 24, 8


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[ds_ring.RingMesh]:
    with one_rank_mesh("gloo", tmp_path) as built:
        yield built


def attend(mesh: ds_ring.RingMesh, q: Tensor, k: Tensor, v: Tensor, **options: object) -> Tensor:
    context = make_ring_context(ds_ring.Causal(), "contiguous", mesh, Options(**options))  # type: ignore[arg-type]
    out, _ = ring_attention_op(q, k, v, context.handle)
    return out


def leaves() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(B, n, S, D, dtype=torch.float64, generator=generator).requires_grad_() for n in (H, G, G)
    ]


@pytest.mark.parametrize("offload", [False, True])
def test_nothing_on_the_device_is_held_between_the_passes(mesh: ds_ring.RingMesh, offload: bool) -> None:
    inputs = [leaf * 1 for leaf in leaves()]
    held = [StorageWeakRef(x.untyped_storage()) for x in inputs]
    out = attend(mesh, *inputs, offload_attention=offload)
    held.append(StorageWeakRef(out.untyped_storage()))
    loss = out.sum()
    del inputs, out
    assert [ref.expired() for ref in held] == [offload] * 4
    loss.backward()


@pytest.mark.parametrize("checkpointed", [False, True])
def test_gradients_are_exact(mesh: ds_ring.RingMesh, checkpointed: bool) -> None:
    values = leaves()
    weights = torch.randn(B, H, S, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def layer(*qkv: Tensor) -> Tensor:
        return attend(mesh, *(x * 1 for x in qkv), offload_attention=True, chunk_bytes=1)

    out = checkpoint(layer, *values, use_reentrant=False) if checkpointed else layer(*values)
    (out * weights).sum().backward()
    want = dense_attention(*values, weights, ds_ring.Causal())
    for leaf, right in zip(values, (want.dq, want.dk, want.dv), strict=True):
        torch.testing.assert_close(leaf.grad, right, rtol=0, atol=1e-12)


def test_the_first_run_of_a_checkpointed_region_copies_nothing(
    mesh: ds_ring.RingMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[torch.Size] = []
    monkeypatch.setattr(
        mesh.owners[HostMemory],
        "start_out",
        lambda x: (copied.append(x.shape), (x.detach().clone(), None))[1],
    )
    out = checkpoint(lambda *x: attend(mesh, *x, offload_attention=True), *leaves(), use_reentrant=False)
    assert copied == []
    out.sum().backward()
    assert len(copied) == 5  # q, k, v, out, lse, in the second run


@pytest.mark.parametrize("scales", [(0.5, 0.5), (0.5, 0.25)])
def test_a_region_that_asks_for_another_pass_runs_it(
    mesh: ds_ring.RingMesh, monkeypatch: pytest.MonkeyPatch, scales: tuple[float, float]
) -> None:
    """As where another batch came in between: the context is another one, shapes are the same."""
    ran, forward, request = [], RingPass.forward, iter(scales)
    monkeypatch.setattr(RingPass, "forward", lambda *values: (ran.append(1), forward(*values))[1])
    checkpoint(
        lambda *x: attend(mesh, *x, scale=next(request)), *leaves(), use_reentrant=False
    ).sum().backward()
    assert len(ran) == len(set(scales))


def test_heads_of_the_next_chunk_come_while_one_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each chunk's heads once, one chunk ahead, and waited for before they are read."""
    plan = build_plan(
        ds_ring.Causal(), make_layout("contiguous", tokens=S, ring_size=1), query_heads=H, kv_heads=G
    )
    chunks = lower_rank(plan.rank(0), backward=True, head_bytes=1, chunk_bytes=1).chunks
    saved = (*(x.detach() for x in leaves()), torch.randn(B, H, S, D), torch.randn(B, H, S))
    told: list[tuple[str, int]] = []

    class Device(HostMemory):
        """The copies arrive when they are waited for: a tensor that is read before is NaN."""

        def start_back(self, host: Tensor, device: torch.device) -> tuple[Tensor, Callable[[], Tensor]]:
            told.append(("started", host.data_ptr()))
            back = torch.full_like(host, torch.nan)
            return back, lambda: (told.append(("waited", host.data_ptr())), back.copy_(host))[1]

    stream = SimpleNamespace(wait_event=lambda arrive: arrive())
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: stream)
    heads = HeadStream(saved, chunks, torch.device("meta"), Device())
    assert len(chunks) == G > 1
    for number, chunk in enumerate(chunks):
        told.clear()
        result = heads.load(chunk)
        for got, whole, of in zip(result, saved, "qkkqq", strict=True):
            assert torch.equal(got, whole[:, chunk.query_heads if of == "q" else chunk.kv_heads])
        started = [what for what, _ in told].count("started")
        assert started == {0: 10, len(chunks) - 1: 0}.get(number, 5)
        assert [what for what, _ in told] == ["started"] * started + ["waited"] * 5


def test_auto_is_for_long_shards_beside_the_cpu() -> None:
    request = [(kind, tokens) for kind in ("cpu", "cuda") for tokens in (LONG_SHARD - 1, LONG_SHARD)]
    assert [heads_on_host("auto", *item) for item in request] == [False, False, False, True]
    assert heads_on_host(True, "cpu", 1) and not heads_on_host(False, "cuda", LONG_SHARD)


def test_auto_takes_nothing_to_the_host_where_all_heads_are_taken_at_once() -> None:
    """(What is refused: tests/unit/ops/test_refusals.py.)"""
    assert not Options(transport="all_gather", offload_attention="auto").offload_on("cuda", LONG_SHARD)


def test_what_is_on_the_host_does_not_change_with_its_original() -> None:
    memory, x = HostMemory(), torch.arange(12.0).reshape(3, 4).t()
    ticket = memory.put(x)
    before = x.clone()
    assert memory.held_bytes == x.nbytes
    x.zero_()
    assert torch.equal(memory.get(ticket), before) and memory.get(ticket).is_contiguous()
    del ticket
    assert memory.held_bytes == 0
