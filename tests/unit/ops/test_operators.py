"""What every operator that ds_ring registers says of itself to torch.compile."""

from __future__ import annotations

import importlib
import pkgutil

import pytest
import torch

import ds_ring
from ds_ring import Causal, RingMesh, RingShapeError
from ds_ring.contrib.compile.placed_op import BatchContexts
from ds_ring.ops.bits import pack, unpack
from ds_ring.ops.context import make_ring_context
from ds_ring.ops.options import Options


def registered() -> list[str]:
    """Names of the package's operators, after all of its modules that register some were imported."""
    for module in pkgutil.walk_packages(ds_ring.__path__, "ds_ring."):
        # needs Triton, which CPU wheels of torch lack, and registers none
        if module.name.endswith((".cuda.merge", ".__main__")):
            continue
        outer = module.name.startswith(("ds_ring.integrations", "ds_ring.contrib"))
        if not outer or any(part in module.name for part in (".compile", "engines.deepspeed")):
            importlib.import_module(module.name)
    names = torch._C._dispatch_get_all_op_names()
    return sorted(name.partition("::")[2] for name in names if name.startswith("ds_ring::"))


def test_no_operator_is_captured_in_a_cuda_graph() -> None:
    """mode="reduce-overhead" replays a graph without the host: messages and deadlines would be lost."""
    names = registered()
    assert {"ring_attention", "ring_attention_backward", "swap_heads_tokens", "sequence_sum"} <= set(names)
    for name in names:
        (overload,) = getattr(torch.ops.ds_ring, name).overloads()
        assert torch.Tag.cudagraph_unsafe in getattr(getattr(torch.ops.ds_ring, name), overload).tags, name


def test_a_packet_gives_back_tensors_of_any_width() -> None:
    """Narrow ones first, as out in bfloat16 stands before its lse: wider elements lie before them."""
    shapes = {torch.bfloat16: (2, 3, 5), torch.float32: (2, 3), torch.float64: (7,)}
    given = [torch.randn(shape).to(dtype) for dtype, shape in shapes.items()]
    found = unpack(pack(given), given)
    assert all(torch.equal(*both) for both in zip(found, given, strict=True))


def test_a_placement_is_for_one_number_of_samples() -> None:
    context = make_ring_context(Causal(), "zigzag", RingMesh.single(), Options())
    placed, x = BatchContexts(((context, (0, 2)), (context, (1,)))), torch.arange(8.0).view(4, 2)

    def doubled(x: torch.Tensor) -> torch.Tensor:
        (found,) = placed.fill(lambda: [torch.empty_like(x)], lambda context, part: [2 * part], x)
        return found

    assert torch.equal(doubled(x[:3]), 2 * x[:3])
    for rows in (2, 4):
        with pytest.raises(RingShapeError, match=f"expected the batch's 3 samples.*got {rows}"):
            doubled(x[:rows])
