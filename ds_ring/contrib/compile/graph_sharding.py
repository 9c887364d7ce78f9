"""Find the layout of a compiled model's tokens, and compare its masks with it in every run of the graph.

The backend puts the operator `ds_ring::place_attention` into a graph, once per kind of mask. See
[Note: placements in compiled code] in ops/ring_op.py.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from ds_ring.comm.collective import collective
from ds_ring.comm.exchange import Exchange
from ds_ring.comm.mesh import RingMesh
from ds_ring.compat.torch import operator
from ds_ring.contrib.compile.graph_attention import get_name, is_tensor
from ds_ring.contrib.compile.placed_op import BatchContexts
from ds_ring.data.layer_patterns import resolve_layer_pattern
from ds_ring.data.packing import positions_in_documents
from ds_ring.data.session import RingSession
from ds_ring.errors import RingPatternError, RingShapeError
from ds_ring.masks.catalog import Causal, Full, SlidingWindow
from ds_ring.masks.pattern import Pattern
from ds_ring.masks.tiles import UNBOUNDED
from ds_ring.ops.context import RingContext, get_object, make_ring_context, new_handle
from ds_ring.ops.options import Options
from ds_ring.patterns.documents.pattern import Documents
from ds_ring.schedule.layout import Layout

PartContexts = tuple[tuple[RingContext, tuple[int, ...]], ...]
KEPT = 64  # shardings of a source; more batches are never between a forward and its backward pass


class GraphSharding(NamedTuple):
    """The layout of a batch's tokens, and its attention."""

    mesh: RingMesh
    pattern: Pattern
    layout: Layout | None  # None where only its name is known
    parts: PartContexts
    checks_positions: bool = True


# Sources return the sharding of the tokens in every run of a graph. `sharding` takes the pattern of one
# attention's mask (None if it is not read), whether masks of the graph differ, and `local_tokens` if the
# graph knows them.


@dataclass(eq=False)
class StaticSource:
    """Take mesh, pattern and layout from the options of the backend."""

    mesh: RingMesh
    pattern: Pattern
    layout: Layout | str
    options: Options

    def sharding(
        self,
        model_pattern: Pattern | None,
        mixed: bool,
        local_tokens: int | None,
        scale: float | None,
        device_type: str,
    ) -> GraphSharding:
        options = self.options.replaced(scale=scale)
        context = make_ring_context(self.pattern, self.layout, self.mesh, options)
        layout = self.layout if isinstance(self.layout, Layout) else None
        if layout is None and local_tokens is not None:
            layout = context.layout_for(local_tokens * self.mesh.ulysses_size, device_type)
        tokens = UNBOUNDED if layout is None else layout.tokens
        pattern = self.pattern
        if model_pattern is not None:
            pattern = resolve_layer_pattern(model_pattern, pattern, tokens, False, mixed)
        if pattern != self.pattern:
            if layout is None:  # for another pattern the name may mean another layout
                raise RingPatternError(
                    f"the model's mask is {model_pattern}, the pattern of the options {self.pattern}; pass"
                    " options={'layout': make_layout(...)} of known length, or that pattern"
                )
            context = make_ring_context(pattern, layout, self.mesh, options)
        context.in_a_graph = True
        return GraphSharding(self.mesh, pattern, layout, ((context, ()),))


@dataclass(eq=False)
class SessionSource:
    """Take the batch that the engine of `ds_ring.initialize` is working on."""

    # With documents the positions are not looked at again: they are the batch's own, `shard_batch` read the
    # documents off them or was given both.

    session: RingSession

    @property
    def mesh(self) -> RingMesh:
        return self.session.run_mesh

    def sharding(
        self,
        model_pattern: Pattern | None,
        mixed: bool,
        local_tokens: int | None,
        scale: float | None,
        device_type: str,
    ) -> GraphSharding:
        sharding = self.session.batches.current
        pattern = sharding.get_layer_pattern(model_pattern, None, mixed)
        parts = sharding.attention(scale, pattern).contexts
        return GraphSharding(sharding.mesh, pattern, sharding.layout, parts, not sharding.groups)


@dataclass(eq=False)
class RegisteredSource:
    """Keep a source under a number that a graph can carry, with its latest shardings."""

    source: StaticSource | SessionSource
    handle: int = field(init=False)
    _recent: OrderedDict[PartContexts, BatchContexts] = field(default_factory=OrderedDict)

    def __post_init__(self) -> None:
        self.handle = new_handle(self)

    def placed(self, parts: PartContexts) -> BatchContexts:
        """Return the one compiled attention of these parts."""
        if parts not in self._recent:
            self._recent[parts] = BatchContexts(parts)
            if len(self._recent) > KEPT:
                self._recent.popitem(last=False)
        self._recent.move_to_end(parts)
        return self._recent[parts]


@operator("ds_ring::place_attention")
def place_op(
    positions: Tensor,
    checked: bool,
    source: int,
    scale: float | None,
    causal: bool | None,
    window: int | None,
    mixed: bool,
) -> Tensor:
    """Return the number of this run's sharding, int64 [1]: what `placed_attention` takes.

    Args:
        positions: position ids [S], [1, S] or [B, S] that the mask is computed from; any tensor if not
            `checked`.
        checked: there are such positions.
        source: number of the `RegisteredSource`.
        scale: of the scores; None is 1 / sqrt(D).
        causal: whether the mask is; None leaves it to the pattern.
        window: tokens that the mask lets a token see, itself included; None: no window.
        mixed: whether masks of the graph have different windows.
    """
    registered = get_object(source, RegisteredSource)
    # A sharding that must not replace the mask is refused. The other ranks hear of it in their attention.
    with collective(registered.source.mesh, "attention"):
        tokens = int(positions.shape[-1]) if checked else None
        model_pattern: Pattern | None = None
        if causal is not None:
            model_pattern = Causal() if causal else Full()
            if window is not None:
                model_pattern = SlidingWindow(window, causal)
        sharding = registered.source.sharding(model_pattern, mixed, tokens, scale, positions.device.type)
    with collective(sharding.mesh, "attention"):
        if checked and sharding.checks_positions:
            check_positions(positions, sharding)
    return torch.tensor([registered.placed(sharding.parts).handle], dtype=torch.int64, device="cpu")


place_op.register_fake(lambda positions, *_: torch.empty(1, dtype=torch.int64, device="cpu"))


# [Note: what may replace a mask]
# A graph's mask is over local slots; the pattern of the layer is the same in global positions. It is
# combined from the mask and the configured pattern by [Note: the pattern of a layer] in
# layer_patterns.py. Where the mask is computed from position ids, these are this rank's positions of the
# layout. Then they restart nowhere, and what looks like packed documents in a shard is where the layout was
# cut. With documents in the pattern they may also count within each document.
def check_positions(positions: Tensor, sharding: GraphSharding) -> None:
    """Raise RingError unless the position ids are those of this rank's slots."""
    assert sharding.layout is not None
    layout, mesh = sharding.layout, sharding.mesh
    shard = layout.positions(mesh.ring_rank)
    part = len(shard) // mesh.ulysses_size
    mine = shard[mesh.ulysses_rank * part : (mesh.ulysses_rank + 1) * part]
    rows = positions.detach().cpu().numpy().reshape(-1, positions.shape[-1])
    if rows.shape[1] != len(mine):
        raise RingShapeError.wrong(
            "position_ids", f"{len(mine)} local tokens", rows.shape[1], "use shard_sequence(x, layout, dim=1)"
        )
    real = mine >= 0
    wanted = [mine]
    for documents in sharding.pattern.conjuncts:
        if isinstance(documents, Documents):  # positions may also count within each document
            ids = np.repeat(np.array(documents.ids), np.diff(documents.starts, append=documents.tokens))
            whole = positions_in_documents(torch.from_numpy(ids)[None])[0].numpy()
            wanted.append(whole[np.minimum(mine, documents.tokens - 1)])
    differs = [((rows != candidate) & real).any(axis=1) for candidate in wanted]
    bad = np.logical_and.reduce(differs)
    if bad.any():
        row = int(bad.argmax())
        slot = int(((rows[row] != mine) & real).argmax())
        raise RingPatternError(
            f"position_ids: expected this rank's positions of {layout} ({mine[slot]} in slot {slot}), got"
            f" {rows[row, slot]} in sample {row}; shard them, for packed documents by their own pattern"
        )


# Rotary embeddings that depend on the length take the greatest position. In a graph this is a maximum over a
# whole tensor of integers that is computed from integers alone (position ids; never the choices of a router
# or of scores): the backend inserts the operator `ds_ring::greatest_position` after it. For a model of
# `ds_ring.initialize`, models does the same.


@operator("ds_ring::greatest_position")
def greatest_position_op(local: Tensor, source: int) -> Tensor:
    """Return the greatest of all ranks' `local` [], an integer tensor. Collective over the sequence group.

    Args:
        local: the greatest of this rank's tokens. Under a session it is the batch's already (positions.py).
        source: number of the `RegisteredSource`.
    """
    registered = get_object(source, RegisteredSource)
    if not isinstance(registered.source, StaticSource):
        return local.clone()
    mesh = registered.source.mesh
    exchange = Exchange(mesh, mesh.timeouts.hop)
    return torch.stack(exchange.all_gather(local, mesh.sequence_group, mesh.sequence_size)).amax(dim=0)


greatest_position_op.register_fake(lambda local, source: torch.empty_like(local))


def ask_for_greatest_positions(module: GraphModule, source: int) -> None:
    """Insert the operator after every maximum of positions in a graph, in place."""
    for node in list(module.graph.nodes):
        if get_name(node) not in ("max", "amax") or not is_tensor(node) or node.meta["example_value"].ndim:
            continue
        if sum(map(is_tensor, node.all_input_nodes)) == 1 and _reads_integers_alone(node):
            with module.graph.inserting_after(node):
                operator = torch.ops.ds_ring.greatest_position.default
                request = module.graph.call_function(operator, (node, source))
            request.meta = dict(node.meta)
            node.replace_all_uses_with(
                request, delete_user_cb=lambda user, request=request: user is not request
            )


def _reads_integers_alone(node: Node) -> bool:
    """Return whether a node is computed from no floating-point tensor."""
    seen, todo = set(), [node]
    while todo:
        source = todo.pop()
        if source in seen:
            continue
        seen.add(source)
        if is_tensor(source):
            dtype = source.meta["example_value"].dtype
            if dtype.is_floating_point or dtype.is_complex:
                return False
        todo += source.all_input_nodes
    return True
