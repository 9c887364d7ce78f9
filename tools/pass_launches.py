"""Count what the host does for a pass of one rank: operators that launch, copies, waits. Needs no GPU.

The production code runs on fake CUDA tensors in a ring whose other ranks are missing. A Triton kernel (merge,
sum of parts), an attention operator, and every other operator that is not a view count as one launch
each. Passes are counted at their second call, when tables are cached. "select" is `ring_select` and
`selected_attention`, in whose backward pass nothing is selected; what the host reads there are the numbers of
a choice of keys, half of them at random, half like the other queries'.

Example:
    python -m tools.pass_launches --local-tokens 8192 --ring-size 8
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from ds_ring import Causal, RingMesh, build_plan, make_layout, ring_select
from ds_ring.comm.collective import collective
from ds_ring.comm.exchange import Exchange
from ds_ring.kernels.flash.kernel import FlashKernel
from ds_ring.kernels.flex.kernel import FlexKernel
from ds_ring.layers.scan.context import scan_context
from ds_ring.layers.scan.halo import halo_backward_op, halo_op
from ds_ring.layers.scan.scan import scan_backward_op, scan_op
from ds_ring.layers.selection import attention, selected_pass
from ds_ring.layers.selection.context import selection_context
from ds_ring.masks.catalog import Full
from ds_ring.ring import accumulator
from ds_ring.ring.pool import Buffers
from ds_ring.ring.ring_pass import RingPass
from ds_ring.schedule.lowering import CHUNK_BYTES_GPU, stage_shards
from tests.fake_cuda import cuda_guard
from tests.host_waits import HostWaits, fake_ring

COPIES = ("copy_", "clone", "_to_copy", "index_select", "cat")
FREE = (
    "empty",
    "empty_like",
    "new_empty",
    "empty_strided",
    "new_empty_strided",
    "set_",
    "detach",
    "_unsafe_view",
)
Both = tuple[Callable[[], Any], Callable[[], Any]]  # the forward and the backward pass


class Launches(HostWaits):  # type: ignore[misc]
    """Operators that launch on a device, copies among them, and waits of the host."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device, self.launches, self.copies = device, 0, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(function, types, args, kwargs)
        name = self.operators[-1]
        tensors = [x for x in tree_leaves((args, kwargs, result)) if isinstance(x, Tensor)]
        is_free = getattr(function, "is_view", False) or name in FREE
        is_free |= getattr(function, "namespace", "aten") == "prim"  # what a tensor's device is, say
        if not is_free and any(x.device.type == self.device for x in tensors):
            self.launches += 1
            self.copies += name in COPIES
        return result

    @contextmanager
    def watching(self) -> Iterator[Launches]:
        """Count inside the block; kernels of Triton are one launch each."""

        def one(*_: object, **__: object) -> None:
            self.launches += 1

        with ExitStack() as stack:
            for name in ("merge_parts_", "add_parts_", "merge_"):
                stack.enter_context(mock.patch.object(accumulator, name, one))
            stack.enter_context(mock.patch.object(selected_pass, "merge_", one))
            stack.enter_context(mock.patch.object(collective, "agree"))
            yield stack.enter_context(super().watching())


def operands(options: Any, device: str = "cuda") -> list[Tensor]:
    """Return q, k, v and the gradient of out, in bfloat16; tokens before heads, as projections write them."""
    all_heads = (options.heads, options.kv_heads, options.kv_heads, options.heads)
    shapes = [(1, options.local_tokens, heads, options.head_dim) for heads in all_heads]
    return [torch.empty(shape, dtype=torch.bfloat16, device=device).transpose(1, 2) for shape in shapes]


def ring_pass(kind: str, mesh: RingMesh, options: Any) -> Both:
    """Return both passes of attention, causal zigzag."""
    size, rank, tokens = mesh.ring_size, mesh.ring_rank, options.local_tokens
    layout = make_layout("zigzag", tokens=tokens * size, ring_size=size)
    shard_bytes = 2 * 2 * tokens * options.kv_heads * options.head_dim
    plan = build_plan(
        Causal(), layout, query_heads=options.heads, kv_heads=options.kv_heads,
        stage_shards=None if kind == "flex" else stage_shards("auto", "cuda", size, size, shard_bytes),
    )  # fmt: skip
    kernel = FlexKernel(128, None, recompute=False) if kind == "flex" else FlashKernel()
    prepared = RingPass(
        plan.rank(rank), kernel, Exchange(mesh), 0.125, chunk_bytes=CHUNK_BYTES_GPU,
        buffers=mesh.owners[Buffers],
    )  # fmt: skip
    q, k, v, grad = operands(options)
    out, lse = prepared.forward(q, k, v)
    return lambda: prepared.forward(q, k, v), lambda: prepared.backward(grad, q, k, v, out, lse)


def scan(mesh: RingMesh, options: Any) -> Both:
    """Return both passes of the scan of a gated delta net: matrices of 128 by 128, 16 heads."""
    layout = make_layout("zigzag", tokens=options.local_tokens * mesh.ring_size, ring_size=mesh.ring_size)
    context = scan_context(layout, mesh)
    states = [torch.empty(context.own_runs, 1, 16, 128, 128, device="cuda") for _ in range(3)]
    # What the operators compute; their fake implementations only make results.
    forward = partial(scan_op._init_fn, states[0], states[1], True, context.handle)
    return forward, partial(scan_backward_op._init_fn, states[2], states[0], states[1], True, context.handle)


def halo(mesh: RingMesh, options: Any) -> Both:
    """Return both passes of the halo of a convolution of four tokens over 8,192 channels."""
    tokens = options.local_tokens
    layout = make_layout("zigzag", tokens=tokens * mesh.ring_size, ring_size=mesh.ring_size)
    context = scan_context(layout, mesh)
    x = torch.empty(1, tokens, 8192, dtype=torch.bfloat16, device="cuda")
    copies = torch.empty(1, context.own_runs, 3, 8192, dtype=torch.bfloat16, device="cuda")
    forward = partial(halo_op._init_fn, x, 1, 3, 0, context.handle)
    return forward, partial(halo_backward_op._init_fn, copies, 1, 3, 0, tokens, context.handle)


def chosen_keys(rank: int, options: Any) -> Tensor:
    """Return positions [1, S, k], half of them at random, half alike for all queries."""
    layout = make_layout(
        "zigzag", tokens=options.local_tokens * options.ring_size, ring_size=options.ring_size
    )
    positions, generator = torch.from_numpy(layout.positions(rank)), torch.Generator().manual_seed(0)
    shares = torch.rand(options.local_tokens, options.chosen, generator=generator)
    shares[:, ::2] = shares[0, ::2]
    return (shares * (positions.unsqueeze(1) + 1)).long().unsqueeze(0)


def selection(mesh: RingMesh, options: Any, chosen: Tensor) -> Both:
    """Return the selection by a lightning indexer with attention to chosen keys, and the backward pass."""
    tokens, ring_size = options.local_tokens, mesh.ring_size
    layout = make_layout("zigzag", tokens=tokens * ring_size, ring_size=ring_size)
    context = selection_context(Full(), layout, mesh, 60.0)
    q, k, v, grad = operands(options)
    index_q, index_k = q.new_empty(1, tokens, 64, 128), q.new_empty(1, tokens, 128)

    def scores(rows: slice, keys: Tensor) -> Tensor:
        return (index_q[:, rows] @ keys.mT.unsqueeze(1)).relu().sum(2)

    def forward() -> Any:
        ring_select(scores, options.chosen, index_k, layout=layout, mesh=mesh)
        return attention.selected_attention_op._init_fn(q, k, v, chosen, context.handle)

    out, lse = forward()
    backward = attention.selected_attention_backward_op._init_fn
    return forward, partial(backward, grad, q, k, v, chosen, out, lse, context.handle, 1)


@contextmanager
def known_numbers(mesh: RingMesh, options: Any, chosen: Tensor) -> Iterator[None]:
    """Let the host read what it would read of these chosen keys; each time it waits."""
    read: list[np.ndarray] = []

    def note(numbers: Tensor) -> np.ndarray:
        read.append(numbers.numpy())
        return read[-1]

    def known(numbers: Tensor) -> np.ndarray:
        with suppress(RuntimeError):  # noted, and then refused of a fake tensor
            torch.ops.aten._local_scalar_dense.default(numbers[0])
        return read[0] if len(numbers) == len(read[0]) else np.array([0, 0])

    layout = make_layout("zigzag", tokens=options.local_tokens * mesh.ring_size, ring_size=mesh.ring_size)
    context = selection_context(Full(), layout, mesh, 60.0)
    most = {"cpu": selected_pass.WORKSPACE["cuda"]}
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(Exchange, "all_to_all", lambda _, parts, __: list(parts)))
        with (
            mock.patch.object(selected_pass, "to_host", note),
            mock.patch.object(selected_pass, "WORKSPACE", most),
        ):
            q, k, v, _ = operands(options, "cpu")
            selected_pass.SelectedPass(context, q, k, v, chosen, 1)
        for module in (attention, selected_pass):
            stack.enter_context(mock.patch.object(module, "to_host", known))
        yield


def counted(kind: str, options: Any) -> list[Launches]:
    """Return the counts of the second forward and the second backward pass of the ring's middle rank."""
    rank, results = options.ring_size // 2, []
    with ExitStack() as stack:
        stack.enter_context(cuda_guard())
        mesh, counting = stack.enter_context(fake_ring(rank, options.ring_size)), partial(Launches, "cuda")
        chosen = chosen_keys(rank, options)
        if kind == "select":
            stack.enter_context(known_numbers(mesh, options, chosen))
        stack.enter_context(FakeTensorMode())
        with counting().watching():
            if kind == "select":
                both = selection(mesh, options, torch.empty(chosen.shape, dtype=torch.int64, device="cuda"))
            else:
                both = LAYERS[kind](mesh, options) if kind in LAYERS else ring_pass(kind, mesh, options)
        for call in both:
            with counting().watching():
                call()
            with counting().watching() as counts:
                call()
            results.append(counts)
    return results


LAYERS: dict[str, Callable[[RingMesh, Any], Both]] = {"scan": scan, "halo": halo}
KINDS = ("flash", "flex", "scan", "halo", "select")


def main(arguments: list[str] | None = None) -> int:
    """Print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, usual in (
        ("local-tokens", 8192), ("ring-size", 8), ("heads", 32), ("kv-heads", 8), ("head-dim", 128),
        ("chosen", 2048),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=usual)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    options = parser.parse_args(arguments)
    print("| pass | launches | copies | host waits |\n|---|---|---|---|")
    for kind in options.kinds:
        for which, counts in zip(("forward", "backward"), counted(kind, options), strict=True):
            print(
                f"| {kind}, {which} | {counts.launches} | {counts.copies} | {len(counts.found)} |", flush=True
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
