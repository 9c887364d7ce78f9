"""One of two ranks of a package without a capability: a causal pass, and rank 0 imports all that is left.

Arguments: rank, file of the store.
"""

from __future__ import annotations

import datetime
import importlib
import json
import pkgutil
import sys

import torch
import torch.distributed as dist

import ds_ring
from ds_ring import Causal, RingMesh, gather_sequence, make_layout, ring_attention, shard_sequence
from ds_ring.plugin import INDEX, PLUGINS

TOKENS = 64


def import_all() -> None:
    """Import what is left; a package from outside may be missing, a module of ours may not."""
    for name in ds_ring.__all__:
        getattr(ds_ring, name)
    left_out = tuple(  # folders that require one that is not there
        f"ds_ring.{name.replace('/', '.')}." for name in json.loads(INDEX.read_text()) if name not in PLUGINS
    )
    for module in pkgutil.walk_packages(ds_ring.__path__, "ds_ring."):
        if module.name.endswith(("__main__", "cuda.merge")) or f"{module.name}.".startswith(left_out):
            continue
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            if error.name is None or error.name.split(".")[0] == "ds_ring":
                raise


def main(rank: int, store: str) -> None:
    if rank == 0:
        import_all()
    dist.init_process_group(
        "gloo", f"file://{store}", rank=rank, world_size=2, timeout=datetime.timedelta(seconds=300)
    )
    mesh = RingMesh.from_world(2)
    layout = make_layout("zigzag", tokens=TOKENS, ring_size=2)
    torch.manual_seed(0)
    q, k, v, grad = torch.randn(4, 1, 2, TOKENS, 16, dtype=torch.float64)
    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    want = torch.nn.functional.scaled_dot_product_attention(*whole, is_causal=True)
    want.backward(grad)
    own = [shard_sequence(x, layout, mesh=mesh, dim=2).clone().requires_grad_() for x in (q, k, v)]
    out = ring_attention(*own, pattern=Causal(), layout=layout, mesh=mesh)
    out.backward(shard_sequence(grad, layout, mesh=mesh, dim=2))
    got = [out.detach(), *(x.grad for x in own)]
    for one, exact in zip(got, [want.detach(), *(x.grad for x in whole)], strict=True):
        error = (gather_sequence(one, layout, mesh=mesh, dim=2) - exact).abs().max().item()
        assert error < 1e-12, error
    mesh.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
