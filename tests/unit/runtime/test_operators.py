"""What every operator that ds_ring registers says of itself to torch.compile."""

from __future__ import annotations

import importlib
import pkgutil

import torch

import ds_ring


def registered() -> list[str]:
    """Names of the package's operators, after all of its modules that register some were imported."""
    for module in pkgutil.walk_packages(ds_ring.__path__, "ds_ring."):
        # needs Triton, which CPU wheels of torch lack, and registers none
        if module.name.endswith(".merge_triton"):
            continue
        if any(part in module.name for part in ("runtime", "integrations.compile", "integrations.deepspeed")):
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
