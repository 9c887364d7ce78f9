"""No host in the loop: a pass over CUDA tensors launches, and waits for nothing.

The tensors are fake, the works are a stand-in for NCCL's, and every operator is recorded. (Before works were
waited for by streams the host asked events or slept 105 times in a causal zigzag pass of four ranks, and 125
times in a striped LongNet pass, copies of pageable memory among them. The tests of documents and of changed
scores stop there for another reason: tables were kept from one FakeTensorMode to the next.)
"""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ds_ring import Causal, Documents, make_layout
from ds_ring.comm.collective import collective
from ds_ring.comm.exchange import Exchange
from ds_ring.comm.mesh import RingMesh
from ds_ring.kernels.flash.kernel import FlashKernel
from ds_ring.kernels.flex.kernel import FlexKernel
from ds_ring.kernels.interface import Kernel
from ds_ring.kernels.pairs import Scores
from ds_ring.layers.scan.context import scan_context
from ds_ring.layers.scan.halo import halo_backward_op, halo_op
from ds_ring.layers.scores import Alibi
from ds_ring.masks.pattern import Pattern
from ds_ring.memory.saved_results.keep_results import KeepResults
from ds_ring.ops.context import make_ring_context
from ds_ring.ops.options import Options
from ds_ring.patterns.captured.score_mod import ScoreMod
from ds_ring.ring.pool import Buffers
from ds_ring.ring.ring_pass import RingPass
from ds_ring.schedule.plan import build_plan
from tests.cases import PATTERNS, document_ids, layout_for
from tests.fake_cuda import cuda_guard
from tests.host_waits import HostWaits, fake_ring

RANK, RING, TOKENS, BLOCK = 1, 4, 512, 16


@pytest.fixture(scope="module")
def mesh() -> Iterator[RingMesh]:
    with cuda_guard(), fake_ring(RANK, RING) as mesh:
        yield mesh


def ring_pass(
    mesh: RingMesh, pattern: Pattern, layout_name: str, scores: Scores | None = None,
    kernel: Kernel | None = None,
) -> RingPass:  # fmt: skip
    layout = layout_for(layout_name, pattern, tokens=TOKENS, ring_size=RING)
    plan = build_plan(pattern, layout, query_heads=4, kv_heads=2)
    kernel = kernel or FlexKernel(BLOCK, None, recompute=False, scores=scores)
    return RingPass(
        plan.rank(RANK), kernel, Exchange(mesh), 0.125, chunk_bytes=1 << 14, buffers=mesh.owners[Buffers]
    )


def operands() -> list[Tensor]:
    shapes = [(1, heads, TOKENS // RING, 64) for heads in (4, 2, 2, 4)]
    return [torch.empty(shape, dtype=torch.bfloat16, device="cuda") for shape in shapes]


def one_pass(made: RingPass, q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> HostWaits:
    with HostWaits().watching() as waits:
        out, lse = made.forward(q, k, v)
        made.backward(grad, q, k, v, out, lse)
    return waits


@pytest.mark.day("window both ways-zigzag")
@pytest.mark.parametrize("layout_name", ["zigzag", "striped"])
@pytest.mark.parametrize("name", list(PATTERNS))
def test_a_pass_waits_for_nothing_after_the_first_of_its_shape(
    mesh: RingMesh, name: str, layout_name: str
) -> None:
    made = ring_pass(mesh, PATTERNS[name](TOKENS), layout_name)
    with FakeTensorMode():
        one_pass(made, *operands())
        waits = one_pass(made, *operands())
    assert waits.operators.count("flex_attention") > 1, "nothing was computed"
    assert waits.ordered >= 6, "no work was waited for by a stream"
    assert not waits.found, (len(waits.found), sorted(set(waits.found)))


def test_documents_of_another_batch_wait_for_nothing_either(mesh: RingMesh) -> None:
    """The shape is known, the mask is new: its tables go over from pinned memory."""
    with FakeTensorMode():
        for seed in range(3):
            pattern = Documents(document_ids(TOKENS, seed=seed)) & Causal()
            waits = one_pass(ring_pass(mesh, pattern, "zigzag"), *operands())
    assert not waits.found, (len(waits.found), sorted(set(waits.found)))


@pytest.mark.parametrize("name", [name for name in PATTERNS if not PATTERNS[name](TOKENS).masks])
@pytest.mark.day("causal", "documents, causal")
def test_a_pass_of_flash_waits_for_nothing_not_even_the_first_of_its_shape(mesh: RingMesh, name: str) -> None:
    """Documents are variable lengths, which go over from pinned memory."""
    with FakeTensorMode():
        one_pass(ring_pass(mesh, Causal(), "striped", kernel=FlashKernel()), *operands())  # starts threads
        made = ring_pass(mesh, PATTERNS[name](TOKENS), "zigzag", kernel=FlashKernel())
        waits = one_pass(made, *operands())
    assert waits.operators.count("_flash_attention_forward") > 1, "nothing was computed"
    assert waits.ordered >= 2, "no work was waited for by a stream"
    assert not waits.found, (len(waits.found), sorted(set(waits.found)))


def test_slots_of_kept_rows_go_over_once_and_without_a_wait(mesh: RingMesh) -> None:
    context, keeps = (
        make_ring_context(Causal(), "zigzag", mesh, Options(recompute_attention=0.5)),
        KeepResults(),
    )
    with FakeTensorMode(), HostWaits().watching() as waits:
        slots = [keeps.first_queries(context, TOKENS // RING, torch.device("cuda:0"))[1] for _ in range(3)]
    assert slots[0].device.type == "cuda" and slots[0] is slots[1] is slots[2]
    assert waits.operators.count("_to_copy") == 1 and not waits.found, waits.operators


def test_changed_scores_wait_for_nothing(mesh: RingMesh) -> None:
    scores = ScoreMod(Alibi((0.5, 0.25, 0.125, 0.0625))).for_heads(range(4))
    made = ring_pass(mesh, Causal(), "zigzag", scores)
    with FakeTensorMode():
        one_pass(made, *operands())
        waits = one_pass(made, *operands())
    assert not waits.found, (len(waits.found), sorted(set(waits.found)))


@pytest.mark.parametrize("documents", [None, Documents(document_ids(TOKENS))])
def test_halos_wait_for_nothing_and_copy_no_index_twice(mesh: RingMesh, documents: Documents | None) -> None:
    layout = make_layout("zigzag", tokens=TOKENS, ring_size=RING)
    handle = scan_context(layout, mesh, documents).handle

    def both_ways() -> HostWaits:
        x = torch.empty(1, TOKENS // RING, 8, device="cuda")
        with mock.patch.object(collective, "agree"), HostWaits().watching() as waits:
            # What the operators compute; their fake implementations only make results.
            copies = halo_op._init_fn(x, 1, 3, 1, handle)
            halo_backward_op._init_fn(copies, 1, 3, 1, TOKENS // RING, handle)
        return waits

    with FakeTensorMode():
        first, second = both_ways(), both_ways()
    assert first.ordered >= 2, "no message was waited for by a stream"
    assert not first.found, (len(first.found), sorted(set(first.found)))
    assert not second.found and "_to_copy" not in second.operators
