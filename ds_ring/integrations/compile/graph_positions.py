"""Replace the greatest local position in a compiled graph by that of the whole sequence.

Owns the operator `ds_ring::greatest_position` and where the backend puts it: behind every maximum over a
whole tensor of integers that is computed from integers alone (position ids; never what a router or the scores
decided). Rotary embeddings that depend on the length are the reason: see rotary.py, which does the same for a
model of `ds_ring.initialize`; a model compiled with a mesh in the options has no session that could.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from ds_ring.integrations.compile.graph_attention import is_tensor
from ds_ring.integrations.compile.graph_facts import name_of
from ds_ring.integrations.compile.graph_sharding import StaticSource, source_of
from ds_ring.runtime.exchange import BATCH_TIMEOUT_S, Exchange


@torch.library.custom_op("ds_ring::greatest_position", mutates_args=(), tags=torch.Tag.cudagraph_unsafe)
def greatest_position_op(local: Tensor, source: int) -> Tensor:
    """Return the greatest of all ranks' `local` [], an integer tensor. Collective over the sequence group.

    Args:
        local: the greatest of this rank's tokens. Under a session it is the batch's already (rotary.py).
        source: number of the `RegisteredSource`.
    """
    registered = source_of(source)
    if not isinstance(registered.source, StaticSource):
        return local.clone()
    mesh = registered.source.mesh
    exchange = Exchange(mesh, BATCH_TIMEOUT_S)
    return torch.stack(exchange.all_gather(local, mesh.sequence_group, mesh.sequence_size)).amax(dim=0)


@greatest_position_op.register_fake
def _(local: Tensor, source: int) -> Tensor:
    return torch.empty_like(local)


def ask_for_greatest_positions(module: GraphModule, source: int) -> None:
    """Insert the operator behind every maximum of positions in a graph, in place."""
    for node in list(module.graph.nodes):
        if _is_whole_maximum(node) and _of_integers_alone(node):
            with module.graph.inserting_after(node):
                operator = torch.ops.ds_ring.greatest_position.default
                asked = module.graph.call_function(operator, (node, source))
            asked.meta = dict(node.meta)
            node.replace_all_uses_with(asked, delete_user_cb=lambda user, asked=asked: user is not asked)


def _is_whole_maximum(node: Node) -> bool:
    """Return whether a node is `max(x)`, `x.max()` and the like: one tensor in, one number out."""
    if name_of(node) not in ("max", "amax") or not is_tensor(node):
        return False
    tensors = [one for one in node.all_input_nodes if is_tensor(one)]
    return len(tensors) == 1 and node.meta["example_value"].ndim == 0


def _of_integers_alone(node: Node) -> bool:
    """Return whether no tensor of fractions stands anywhere before it."""
    seen, todo = set(), [node]
    while todo:
        one = todo.pop()
        if one in seen:
            continue
        seen.add(one)
        if is_tensor(one):
            dtype = one.meta["example_value"].dtype
            if dtype.is_floating_point or dtype.is_complex:
                return False
        todo += one.all_input_nodes
    return True
