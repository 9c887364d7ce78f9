"""Every public operator that takes tensors, a row each: small inputs, their shards, the call, the gradients.

    row, place = OPERATORS["halo"], Place(mesh, row.layout)
    whole = row.inputs(torch.float64)           # the same on every rank
    out = row.call(place, **row.shards(place.grid, whole, rank))
    wanted = alone(row, whole)                  # the output and gradients of one process: a ring of one rank

Inputs are in the range of any dtype. A call's output is one tensor. Halos and states of runs, whose number
differs by ring size, are put together to an output for each token.

Shapes: B samples, T tokens, H query heads, G key/value heads, D and E head dims.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

import ds_ring
from ds_ring import PassOptions, RingMesh, make_layout
from ds_ring.layers.distance_bias.attention import DistanceBiasAttention
from ds_ring.schedule.layout import Layout

B, T, H, G, D, E = 2, 24, 4, 2, 8, 6
KEYS = 12  # of another sequence
IDS = torch.tensor([0] * 5 + [1] * 11 + [2] * 8)  # of the documents

Inputs = dict[str, Tensor]


class Grid(NamedTuple):
    """The ranks of one sequence, and the layout of its tokens by name."""

    ring_size: int
    ulysses_size: int = 1
    layout: str = "zigzag"

    def layout_of(self, tokens: int) -> Layout:
        """The layout of a sequence of so many tokens."""
        return make_layout(
            self.layout, tokens=tokens, ring_size=self.ring_size, multiple_of=self.ulysses_size
        )

    def shard(self, x: Tensor, dim: int, rank: int) -> Tensor:
        """The tokens in `dim` of one rank of the sequence; differentiable, and without a mesh."""
        layout, parts = self.layout_of(x.shape[dim]), self.ulysses_size
        slots = layout.part_slots(parts)
        first = rank % parts * slots
        positions = torch.from_numpy(layout.positions(rank // parts)[first : first + slots].copy())
        return x.index_select(dim, positions.clamp_min(0))


class Place(NamedTuple):
    """Where a rank calls an operator."""

    mesh: RingMesh
    name: str = "zigzag"
    tokens: int = T

    @property
    def ids(self) -> Tensor:
        """The number of each token's document, [tokens]."""
        return (IDS + 3 * torch.arange(self.tokens // T, device="cpu")[:, None]).flatten()

    @property
    def documents(self) -> ds_ring.Documents:
        return ds_ring.Documents(self.ids)

    @property
    def grid(self) -> Grid:
        return Grid(self.mesh.ring_size, self.mesh.ulysses_size, self.name)

    @property
    def layout(self) -> Layout:
        return self.grid.layout_of(self.tokens)

    @property
    def where(self) -> dict[str, Any]:
        return {"mesh": self.mesh, "layout": self.layout}


class Operator(NamedTuple):
    """A row.

    Attributes:
        inputs: makes the inputs of the whole sequence, whose values have this dtype.
        dims: by input, the dimension of its tokens; None for what every rank has whole.
        call: of a place and the local inputs; returns one tensor.
        out_dim: the dimension of tokens of the output; None for what every rank gets whole.
        gradients: the inputs that get a gradient. That of an input that is whole is the sum of all ranks'.
        loss: of an output that is whole: "sum" if the loss is that of all ranks together, "once" if every
            rank computes the same one, which counts once.
        layout: the name of a layout that suits.
        ulysses: "any"; "none" if it takes rings alone.
        any_dtype: copies values of any dtype.
    """

    inputs: Callable[[torch.dtype], Inputs]
    dims: Mapping[str, int | None]
    call: Callable[..., Tensor]
    out_dim: int | None
    gradients: tuple[str, ...]
    loss: Literal["sum", "once"] = "sum"
    layout: str = "zigzag"
    ulysses: Literal["any", "none"] = "any"
    any_dtype: bool = False

    def shards(self, grid: Grid, whole: Inputs, rank: int) -> Inputs:
        """Return one rank's inputs, leaves whose gradients are those of this rank alone."""
        found = {}
        for name, x in whole.items():
            dim = self.dims[name]
            found[name] = x.detach().clone() if dim is None else grid.shard(x.detach(), dim, rank)
        return found


class Result(NamedTuple):
    """An output, and gradients by input."""

    out: Tensor
    gradients: dict[str, Tensor]


def drawn(dtype: torch.dtype, seed: int = 0, **shapes: Sequence[int]) -> Inputs:
    """Normal numbers; of dtypes without fractions whole ones, from 0 to 3."""
    generator, found = torch.Generator().manual_seed(seed), {}
    for name, shape in shapes.items():
        x = torch.randn(tuple(shape), generator=generator, dtype=torch.float64)
        is_whole = not (dtype.is_floating_point or dtype.is_complex)
        found[name] = ((4 * x).long() % 4 if is_whole else x).to(dtype)
    return found


def longer(row: Operator, whole: Inputs) -> Inputs:
    """The inputs of a sequence of 2 T tokens."""

    def twice(x: Tensor, dim: int | None) -> Tensor:
        if dim is None:  # what ranks have whole has tokens if only the output is sharded
            dim = row.out_dim
        if dim is None or x.dim() <= dim or x.shape[dim] not in (T, KEYS):
            return x
        return torch.cat([x, (0.7 * x.flip(dim)).to(x.dtype)], dim)

    return {name: twice(x, row.dims[name]) for name, x in whole.items()}


def weight_of(out: Tensor, seed: int = 7) -> Tensor:
    """The gradient of the whole output, in float64."""
    return torch.randn(out.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def loss_of(row: Operator, place: Place, out: Tensor, rank: int, weight: Tensor) -> Tensor:
    """The part of one rank of the loss sum(out * weight), `weight` that of the whole output."""
    mine = weight if row.out_dim is None else place.grid.shard(weight, row.out_dim, rank)
    loss = (out * mine.to(out.dtype)).sum()
    return loss / place.mesh.sequence_size if row.out_dim is None and row.loss == "sum" else loss


def alone(row: Operator, whole: Inputs, gradients: Sequence[str] | None = None, tokens: int = T) -> Result:
    """Output and gradients on a ring of one rank."""
    place = Place(RingMesh.single(), row.layout, tokens)
    wanted = row.gradients if gradients is None else tuple(gradients)
    given = {name: x.detach().clone().requires_grad_(name in wanted) for name, x in whole.items()}
    out = row.call(place, **given)
    if not wanted:
        return Result(out.detach(), {})
    found = torch.autograd.grad(loss_of(row, place, out, 0, weight_of(out)), [given[name] for name in wanted])
    return Result(out.detach(), dict(zip(wanted, found, strict=True)))


def errors(row: Operator, grid: Grid, found: Sequence[Result], want: Result) -> dict[str, float]:
    """How far the results of all ranks are from those of one process, by name.

    The largest difference, over the largest magnitude if that is above 1.
    """
    worst: dict[str, float] = {}

    def compare(name: str, got: Tensor, wanted: Tensor) -> None:
        if got.shape != wanted.shape:
            worst[name] = float("inf")
            return
        error = (
            (got.to(wanted.dtype) - wanted).abs().max() if got.is_floating_point() else (got != wanted).any()
        )
        scale = 1.0 if not wanted.is_floating_point() else max(1.0, float(want_of(name).abs().max()))
        worst[name] = max(worst.get(name, 0.0), float("inf" if error != error else error) / scale)

    def want_of(name: str) -> Tensor:
        return want.out if name == "out" else want.gradients[name[1:]]

    for rank, one in enumerate(found):
        out = want.out if row.out_dim is None else grid.shard(want.out, row.out_dim, rank)
        compare("out", one.out, out)
        for name, gradient in one.gradients.items():
            dim = row.dims[name]
            if dim is not None:
                compare(f"d{name}", gradient, grid.shard(want.gradients[name], dim, rank))
            elif row.loss == "once":
                compare(f"d{name}", gradient, want.gradients[name])
    partial = [name for name in want.gradients if row.dims[name] is None and row.loss == "sum"]
    for name in partial if all(set(one.gradients) == set(found[0].gradients) for one in found) else ():
        if name in found[0].gradients:
            compare(f"d{name}", sum(one.gradients[name] for one in found), want.gradients[name])  # type: ignore[arg-type]
    return worst


# Inputs and calls


def qkv(dtype: torch.dtype) -> Inputs:
    return drawn(dtype, q=(B, H, T, D), k=(B, G, T, D), v=(B, G, T, E))


ATTENDED: dict[str, int | None] = {"q": 2, "k": 2, "v": 2}
QKV = ("q", "k", "v")


def tokens(dtype: torch.dtype) -> Inputs:
    return drawn(dtype, x=(B, T, 3))


def attend(place: Place, q: Tensor, k: Tensor, v: Tensor, **more: Any) -> Tensor:
    return ds_ring.ring_attention(q, k, v, **({"pattern": ds_ring.Causal()} | place.where | more))  # type: ignore[no-any-return]


def attend_by(transport: str) -> Callable[..., Tensor]:
    def call(place: Place, **given: Tensor) -> Tensor:
        return attend(place, **given, options=PassOptions(transport=transport))

    return call


def with_lse(out: Tensor, lse: Tensor) -> Tensor:
    return torch.cat([out.to(lse.dtype), lse.unsqueeze(-1)], dim=-1)


def attend_with_sinks(place: Place, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    return with_lse(*attend(place, q, k, v, sinks=sinks, return_lse=True))


def attend_documents(place: Place, **given: Tensor) -> Tensor:
    return attend(
        place, **given, pattern=place.documents & ds_ring.SlidingWindow(5), score_mod=ds_ring.Softcap(2.0)
    )


def attend_mask_mod(place: Place, **given: Tensor) -> Tensor:
    ids = place.ids
    return attend(place, **given, pattern=ds_ring.MaskMod(lambda b, h, q, k: (q >= k) & (ids[q] == ids[k])))


def attend_module(place: Place, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ds_ring.RingAttention(ds_ring.Causal(), **place.where)(q, k, v)  # type: ignore[no-any-return]


def decode(place: Place, q: Tensor, k: Tensor, v: Tensor, **more: Any) -> Tensor:
    return ds_ring.decode_attention(q, k, v, **place.where, **more)  # type: ignore[no-any-return]


def decode_with_sinks(place: Place, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    return with_lse(*decode(place, q, k, v, sinks=sinks, return_lse=True))


def few_queries(dtype: torch.dtype) -> Inputs:
    return qkv(dtype) | drawn(dtype, 1, q=(B, H, 3, D))


def latents(dtype: torch.dtype) -> Inputs:
    return drawn(dtype, q=(B, H, T, 12), latent=(B, 1, T, 6), rope=(B, 1, T, 4), up_projection=(H * 16, 6))


def attend_latents(place: Place, **given: Tensor) -> Tensor:
    return ds_ring.latent_attention(**given, pattern=ds_ring.Causal(), **place.where)  # type: ignore[no-any-return]


def attend_latents_module(
    place: Place, q: Tensor, latent: Tensor, rope: Tensor, up_projection: Tensor
) -> Tensor:
    made = ds_ring.LatentAttention(ds_ring.Causal(), **place.where)
    return made(q, latent, rope, up_projection=up_projection)  # type: ignore[no-any-return]


def attend_between(place: Place, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    keys = place.grid.layout_of(KEYS * place.tokens // T)
    return ds_ring.cross_attention(q, k, v, pattern=ds_ring.Full(), key_layout=keys, **place.where)  # type: ignore[no-any-return]


def attend_between_module(place: Place, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    keys = place.grid.layout_of(KEYS * place.tokens // T)
    return ds_ring.CrossAttention(ds_ring.Full(), key_layout=keys, **place.where)(q, k, v)  # type: ignore[no-any-return]


def other_keys(dtype: torch.dtype) -> Inputs:
    return drawn(dtype, q=(B, H, T, D), k=(B, G, KEYS, D), v=(B, G, KEYS, E))


def by_run(place: Place, x: Tensor, dim: int) -> list[Tensor]:
    """The tokens of each run of this rank, where Ulysses cuts no run."""
    parts, mesh = place.mesh.ulysses_size, place.mesh
    slots, found, first = place.layout.part_slots(parts), [], 0
    begin = mesh.ulysses_rank * slots
    for _, _, length in place.layout.runs(mesh.ring_rank).tolist():
        least, end = max(first, begin) - begin, min(first + length, begin + slots) - begin
        if least < end:
            found.append(x.narrow(dim, least, end - least))
        first += length
    return found


def halo(place: Place, x: Tensor) -> Tensor:
    """Each token with the one two before it and the one after it."""
    copies = ds_ring.halo(x, 2, 1, dim=1, **place.where)  # [B, R, 3, ...]
    found = []
    for number, own in enumerate(by_run(place, x, 1)):
        front, behind = copies[:, number].split([2, 1], dim=1)
        whole = torch.cat([front, own, behind], dim=1)
        length = own.shape[1]
        found.append(torch.cat([whole[:, i : i + length] for i in (0, 2, 3)], dim=-1))
    return torch.cat(found, dim=1)


def scan(place: Place, decay: Tensor, x: Tensor) -> Tensor:
    """h_t = decay_t h_(t-1) + x_t."""
    moves, ends, outs = [], [], []
    for decays, own in zip(by_run(place, decay, 1), by_run(place, x, 1), strict=True):
        state, move, states, all_moves = torch.zeros_like(own[:, 0]), torch.ones_like(decays[:, 0]), [], []
        for t in range(own.shape[1]):
            state, move = decays[:, t] * state + own[:, t], decays[:, t] * move
            states.append(state)
            all_moves.append(move)
        moves.append(move)
        ends.append(state)
        outs.append((torch.stack(states, dim=1), torch.stack(all_moves, dim=1)))
    before = ds_ring.ring_scan(torch.stack(moves), torch.stack(ends), **place.where)
    return torch.cat(
        [own + move * state[:, None] for (own, move), state in zip(outs, before, strict=True)], 1
    )


def matrix_scan(place: Place, move: Tensor, x: Tensor) -> Tensor:
    """h_t = M_t h_(t-1) + x_t, of matrices [B, T, K, K] and states [B, T, K, V]."""
    moves, ends, outs = [], [], []
    for of_run, own in zip(by_run(place, move, 1), by_run(place, x, 1), strict=True):
        state, total, states, totals = torch.zeros_like(own[:, 0]), None, [], []
        for t in range(own.shape[1]):
            state = of_run[:, t] @ state + own[:, t]
            total = of_run[:, t] if total is None else of_run[:, t] @ total
            states.append(state)
            totals.append(total)
        moves.append(total)
        ends.append(state)
        outs.append((torch.stack(states, dim=1), torch.stack(totals, dim=1)))
    before = ds_ring.ring_scan(torch.stack(moves), torch.stack(ends), matrix=True, **place.where)
    return torch.cat(
        [own + move @ state[:, None] for (own, move), state in zip(outs, before, strict=True)], 1
    )


def matrices(dtype: torch.dtype) -> Inputs:
    found = drawn(dtype, move=(B, T, 2, 2), x=(B, T, 2, 3))
    return found | {"move": (0.5 * found["move"]).to(dtype)}


def select(place: Place, q: Tensor, k: Tensor) -> Tensor:
    def scores(rows: slice, keys: Tensor) -> Tensor:
        return torch.einsum("bhqd,bnhd->bqn", q[:, :G, rows], keys)

    return ds_ring.ring_select(scores, 5, k.transpose(1, 2), pattern=ds_ring.Causal(), **place.where)


def attend_selected(place: Place, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The chosen keys are the same for every dtype: every other one up to the query."""
    positions = torch.from_numpy(place.layout.positions(place.mesh.ring_rank).copy())
    chosen = positions[:, None] - 2 * torch.arange(5)
    chosen = chosen.where(chosen >= 0, -1).expand(len(q), -1, -1)
    return with_lse(*ds_ring.selected_attention(q, k, v, chosen.contiguous(), return_lse=True, **place.where))


def moba(place: Place, **given: Tensor) -> Tensor:
    return ds_ring.moba_attention(**given, block_size=3, top_k=2, documents=place.documents, **place.where)


def largest(place: Place, q: Tensor, k: Tensor) -> Tensor:
    return ds_ring.max_logits(q, k, **place.where)


def ngrams(place: Place, ids: Tensor) -> Tensor:
    return ds_ring.ngram_rows(ids, (3, 5, 7), ((11, 13), (17,)), documents=place.documents, **place.where)


def rows_of_tokens(dtype: torch.dtype) -> Inputs:
    rows = torch.arange(B * T).view(B, T) * 7 % T
    return drawn(dtype, table=(T, 3)) | {"rows": rows}


def look_up(place: Place, table: Tensor, rows: Tensor) -> Tensor:
    return ds_ring.sharded_rows(table, rows, mesh=place.mesh)


def by_distance(place: Place, q: Tensor, k: Tensor, v: Tensor, profiles: Tensor) -> Tensor:
    made = DistanceBiasAttention(ds_ring.SlidingWindow(5), scale=0.4, **place.where)
    return made(q, k, v, profiles=profiles)  # type: ignore[no-any-return]


def wide_queries(dtype: torch.dtype) -> Inputs:
    return qkv(dtype) | drawn(dtype, 1, q=(B, H, T, D + 3), profiles=(3, 5))


def _row(call: Callable[..., Tensor], **more: Any) -> Operator:
    """A row of attention."""
    given: dict[str, Any] = {"inputs": qkv, "dims": ATTENDED, "out_dim": 2, "gradients": QKV}
    return Operator(call=call, **(given | more))


def _named(names: str, dim: int | None = 1) -> dict[str, int | None]:
    return dict.fromkeys(names.split(), dim)


SINKS: dict[str, Any] = {
    "inputs": lambda dtype: qkv(dtype) | drawn(dtype, 1, sinks=(H,)),
    "dims": ATTENDED | {"sinks": None},
    "gradients": (*QKV, "sinks"),
}
FEW: dict[str, Any] = {
    "inputs": few_queries, "dims": ATTENDED | {"q": None}, "out_dim": None, "loss": "once", "ulysses": "none"
}  # fmt: skip
LATENTS: dict[str, Any] = {
    "inputs": latents, "dims": {"q": 2, "latent": 2, "rope": 2, "up_projection": None},
    "gradients": ("q", "latent", "rope", "up_projection"),
}  # fmt: skip

OPERATORS: dict[str, Operator] = {
    "ring_attention": _row(attend),
    "ring_attention, sinks and lse": _row(attend_with_sinks, **SINKS),
    "ring_attention, documents and softcap": _row(attend_documents),
    "ring_attention, MaskMod": _row(attend_mask_mod),
    "ring_attention, all_gather": _row(attend_by("all_gather")),
    "RingAttention": _row(attend_module),
    "decode_attention": _row(decode, **FEW),
    "decode_attention, sinks and lse": _row(
        decode_with_sinks,
        **FEW | {
            "inputs": lambda dtype: few_queries(dtype) | drawn(dtype, 2, sinks=(H,)),
            "dims": ATTENDED | {"q": None, "sinks": None}, "gradients": (*QKV, "sinks"),
        },
    ),
    "latent_attention": _row(attend_latents, **LATENTS),
    "LatentAttention": _row(attend_latents_module, **LATENTS),
    "cross_attention": _row(attend_between, inputs=other_keys),
    "CrossAttention": _row(attend_between_module, inputs=other_keys),
    "distance bias": _row(
        by_distance, inputs=wide_queries, dims=ATTENDED | {"profiles": None}, gradients=(*QKV, "profiles")
    ),
    "selected_attention": _row(attend_selected, ulysses="none"),
    "moba_attention": _row(moba, ulysses="none"),
    "ring_select": Operator(
        lambda dtype: drawn(dtype, q=(B, H, T, D), k=(B, G, T, D)), _named("q k", 2), select, 1, (),
        ulysses="none",
    ),
    "max_logits": Operator(
        lambda dtype: drawn(dtype, q=(B, H, T, D), k=(B, G, T, D)), _named("q k", 2), largest, None, (),
        ulysses="none",
    ),
    "shard_sequence": Operator(
        tokens, {"x": None}, lambda place, x: ds_ring.shard_sequence(x, place.layout, dim=1, mesh=place.mesh),
        1, ("x",), any_dtype=True,
    ),
    "gather_sequence": Operator(
        tokens, {"x": 1}, lambda place, x: ds_ring.gather_sequence(x, place.layout, dim=1, mesh=place.mesh),
        None, ("x",), any_dtype=True,
    ),
    "halo": Operator(tokens, {"x": 1}, halo, 1, ("x",), any_dtype=True),
    "shift_sequence": Operator(
        tokens, {"x": 1},
        lambda place, x: ds_ring.shift_sequence(x, 1, dim=1, documents=place.documents, **place.where),
        1, ("x",), any_dtype=True,
    ),
    "ring_scan": Operator(
        lambda dtype: drawn(dtype, decay=(B, T, 1), x=(B, T, 3)), _named("decay x"), scan, 1, ("decay", "x")
    ),
    "ring_scan, matrix": Operator(
        matrices, _named("move x"), matrix_scan, 1, ("move", "x")
    ),
    "ngram_rows": Operator(
        lambda dtype: drawn(dtype, ids=(B, T)), {"ids": 1}, ngrams, 1, (), any_dtype=True
    ),
    "sharded_rows": Operator(
        rows_of_tokens, {"table": 0, "rows": 1}, look_up, 1, ("table",), layout="contiguous"
    ),
}  # fmt: skip
