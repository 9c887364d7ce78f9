"""Layers that pass on a state or look back a few tokens: short convolutions, state-space models, delta rules.

transformers' layers call functions of their modeling file by name (`causal_conv1d_fn`,
`torch_chunk_gated_delta_rule`, ...), which run fla's, mamba-ssm's or causal-conv1d's kernels where these are
installed, and torch otherwise. `model.py`'s table wraps these functions. On a ring, a wrapper calls the
function itself for each piece of the shard (a run, or the part of a run in one document), and adds what comes
from tokens on other ranks. So each kernel runs unchanged.

A recurrence that is linear in its state S begins a piece with S0. Its outputs are out_t + reach_t(S0), where
out_t are the outputs for S0 = 0, and its final state is M S0 + B. `ring_scan` computes S0 from M and B of all
runs. For delta rules (Yang et al. 2024, "Gated Delta Networks"; Kimi Linear 2025), M is a matrix: one call
of the kernel with K more value columns, which begin with the identity, gives out_t and reach_t, B and M. For
state-space models (Gu and Dao 2023, Dao and Gu 2024), M is a product of decays.

Shapes: B samples, S local slots, L tokens of a piece, H heads, K key dim, V value dim, N states, C channels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ds_ring.errors import RingConfigError
from ds_ring.integrations.deepspeed.batch import SHARDING
from ds_ring.integrations.deepspeed.batch_sharding import BatchSharding
from ds_ring.layers.scan.scan import Neighbours, compose, halo_op, neighbours_of, scan_op, shift_sequence

Original = Callable[..., Any]


class Computed(NamedTuple):
    """What one kernel call returns of `b` pieces of one length that begin with zeros.

    Attributes:
        out: outputs, [b, ..., L, ...].
        final: B, the final states, [b, ...].
        transition: M over each piece, [b, ...], as `ring_scan` takes it; any values where no state comes.
        reach: S0 [b, ...] -> what the state before the pieces adds to the outputs; None where none comes.
    """

    out: Tensor
    final: Tensor
    transition: Tensor
    reach: Callable[[Tensor], Tensor] | None


# Takes the pieces' tensors, and whether a state comes.
PieceKernel = Callable[[Sequence[Tensor], bool], Computed]

active: list[BatchSharding] = []  # of the layers that are being computed, innermost last


def sharding_of(kwargs: dict[str, Any]) -> BatchSharding | None:
    """Return the sharding of a call, and take it out of the arguments; None if each rank has all tokens."""
    told: BatchSharding | None = kwargs.pop(SHARDING, None)
    if told is None and active:
        told = active[-1]
    return None if told is None or told.is_replicated else told


def rows_of(sharding: BatchSharding) -> list[tuple[Neighbours, list[int]]]:
    """Return the neighbours of each set of documents, and the rows that have them; [] for all rows."""
    layout, mesh, timeout = sharding.layout, sharding.mesh, float(sharding.config.hop_timeout_seconds)
    if not sharding.groups or sharding.masks_padding:
        return [(neighbours_of(layout, mesh, None, timeout), [])]
    return [
        (neighbours_of(layout, mesh, group.documents, timeout), list(group.rows)) for group in sharding.groups
    ]


def in_order(parts: Sequence[Tensor], rows: Sequence[list[int]]) -> Tensor:
    """Return what was computed of each set of rows in the order of the batch, which is dimension 0."""
    if not rows[0]:
        return parts[0]
    order = [row for of_set in rows for row in of_set]
    return torch.cat([*parts])[torch.tensor(order).argsort().to(parts[0].device)]


def by_rows(sharding: BatchSharding, run: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Return `run(neighbours, *tensors)` for the rows of each set of documents; dimension 0 is the batch."""
    sets = rows_of(sharding)
    outs = [run(near, *(x[rows] if rows else x for x in tensors)) for near, rows in sets]
    return in_order(outs, [rows for _, rows in sets])


def convolution(
    original: Original, x: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any, **kwargs: Any
) -> Any:
    """Convolve [B, C, S] causally with weight [C, width], as `causal_conv1d_fn`."""
    sharding = sharding_of(kwargs)
    if sharding is None:
        return original(x, weight, bias, *args, **kwargs)

    def run(near: Neighbours, x: Tensor) -> Tensor:
        return with_halo(
            near, x, weight.shape[-1] - 1, lambda tokens: original(tokens, weight, bias, *args, **kwargs)
        )

    return by_rows(sharding, run, x)


def with_halo(near: Neighbours, x: Tensor, before: int, call: Callable[[Tensor], Tensor]) -> Tensor:
    """Return what a causal convolution makes of x [B, C, S].

    `call` gets all pieces one after the other, each behind the `before` tokens in front of it (zeros where a
    document begins). Its result for a token stands at the token's place.
    """
    beside = halo_op(x, 2, before, 0, near.handle)  # [B, C, R, before]
    zeros = x.new_zeros((*x.shape[:2], before))
    parts: list[Tensor] = []
    for piece in near.pieces:
        front = beside[:, :, piece.run] if piece.is_first else zeros
        parts += [front, x[:, :, piece.slot : piece.slot + piece.length]]
    if not parts:  # no tokens, but the backward pass is every rank's
        return x + beside.flatten(2).sum()
    convolved = call(torch.cat(parts, dim=2))
    found, first = [], 0
    for piece in near.pieces:
        found.append(convolved[:, :, first + before : first + before + piece.length])
        first += before + piece.length
    return padded(torch.cat(found, dim=2), x.shape[2], 2)


def token_before(near: Neighbours, x: Tensor, first: Tensor) -> Tensor:
    """Return the token before each token of x [B, S, C], and `first` [C] where a document begins."""
    before = shift_sequence(
        x, -1, dim=1, layout=near.layout, mesh=near.mesh, documents=near.documents,
        hop_timeout_s=near.hop_timeout_s,
    )  # fmt: skip
    return torch.where(near.exists(-1, x.device)[:, None], before, first)


def padded(x: Tensor, slots: int, dim: int) -> Tensor:
    """Append zeros for the padding slots at the end of a shard."""
    if x.shape[dim] == slots:
        return x
    shape = list(x.shape)
    shape[dim] = slots - x.shape[dim]
    return torch.cat([x, x.new_zeros(shape)], dim=dim)


def kinds_of(near: Neighbours) -> dict[tuple[int, bool], list[int]]:
    """Return the numbers of this rank's pieces by their length, and whether they get a state."""
    kinds: dict[tuple[int, bool], list[int]] = {}
    for number, piece in enumerate(near.pieces):
        kinds.setdefault((piece.length, piece.continues), []).append(number)
    if not kinds:
        raise RingConfigError(
            f"{near.layout}: expected tokens on every rank of a model with recurrent layers, got none on rank"
            f" {near.mesh.sequence_rank} of the sequence; use fewer ranks for so short a sequence"
        )
    return kinds


def recurrence(
    sharding: BatchSharding, tensors: Sequence[Tensor], call: PieceKernel, matrix: bool, dim: int,
    wants_state: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Return the outputs of a recurrence over all pieces, and the state after the last token of each sample.

    Args:
        sharding: of the batch.
        tensors: [B, ..., S, ...] with the slots in dimension `dim`.
        call: computes pieces of one length.
        matrix: see `ring_scan`.
        dim: 1 or 2.
        wants_state: the state is returned, on every rank; it has no gradient.
    """
    sets = rows_of(sharding)
    found = [
        _recurrence_of_rows(near, [x[rows] if rows else x for x in tensors], call, matrix, dim, wants_state)
        for near, rows in sets
    ]
    rows = [one for _, one in sets]
    out, states = in_order([one for one, _ in found], rows), [one for _, one in found if one is not None]
    return out, in_order(states, rows) if wants_state else None


def _recurrence_of_rows(
    near: Neighbours, tensors: Sequence[Tensor], call: PieceKernel, matrix: bool, dim: int, wants_state: bool
) -> tuple[Tensor, Tensor | None]:
    """Return what `recurrence` does, of rows with the same documents."""
    batch, slots = tensors[0].shape[0], tensors[0].shape[dim]
    kinds = kinds_of(near) if near.pieces else {}
    outs: dict[int, Tensor] = {}
    finals: dict[int, tuple[Tensor, Tensor]] = {}  # M and B by run
    reaches: list[tuple[list[int], Tensor, Callable[[Tensor], Tensor]]] = []
    for (length, continues), numbers in kinds.items():
        first = [near.pieces[number].slot for number in numbers]
        found = call([torch.cat([x.narrow(dim, slot, length) for slot in first]) for x in tensors], continues)
        for place, number in enumerate(numbers):
            rows = slice(place * batch, (place + 1) * batch)
            outs[number] = found.out[rows]
            if near.pieces[number].is_last:
                finals[near.pieces[number].run] = found.transition[rows], found.final[rows]
        if found.reach is not None:
            reaches.append((numbers, found.out, found.reach))
    if kinds:
        moves, increments = (torch.stack([finals[run][i] for run in range(near.own_runs)]) for i in (0, 1))
    else:  # no token is here: a padding slot says what the states of others look like
        found = call([x.narrow(dim, 0, 1) for x in tensors], False)
        moves, increments = found.transition[None, :][:0], found.final[None, :][:0]
        outs[0] = found.out.narrow(dim, 0, 0)
    states = scan_op(moves, increments, matrix, near.handle)
    for numbers, out, reach in reaches:
        reached = out + reach(torch.cat([states[near.pieces[number].run] for number in numbers])).to(
            out.dtype
        )
        for place, number in enumerate(numbers):
            outs[number] = reached[place * batch : (place + 1) * batch]
    whole = torch.cat([outs[number] for number in sorted(outs)], dim=dim)
    if not reaches:  # every rank takes part in the backward pass of the scan
        whole = whole + states.flatten()[:0].sum().to(whole.dtype)
    last = _state_after(near, moves, increments, states, matrix) if wants_state else None
    return padded(whole, slots, dim), last


def _state_after(near: Neighbours, moves: Tensor, increments: Tensor, states: Tensor, matrix: bool) -> Tensor:
    """Return the state after the last token of the sequence, on every rank.

    Args:
        near: the neighbours.
        moves, increments, states: M and B of this rank's runs, and the states with which they begin.
        matrix: see `ring_scan`.
    """
    last = len(near.runs.starts) - 1
    found = increments.new_zeros(increments.shape[1:])
    for place, run in enumerate(near.runs.of_rank(near.mesh.sequence_rank).tolist()):
        if run == last:
            passes, _ = near.masks(increments)
            found = compose((moves * passes, increments), (None, states), matrix)[1][place].contiguous()
    if near.exchange is not None and near.mesh.sequence_group is not None:
        with near.mesh.in_call():
            near.exchange.all_reduce(found, near.mesh.sequence_group)
    return found


def delta_rule(
    original: Original, query: Tensor, key: Tensor, value: Tensor, *args: Any, g: Tensor, beta: Tensor,
    initial_state: Tensor | None = None, output_final_state: bool = False, **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Compute a gated delta rule or Kimi delta attention of q and k [B, S, H, K] and v [B, S, H, V]."""
    sharding = sharding_of(kwargs)
    given = {"g": g, "beta": beta, "initial_state": initial_state, "output_final_state": output_final_state}
    if sharding is None:
        found: tuple[Tensor, Tensor | None] = original(query, key, value, *args, **given, **kwargs)
        return found
    refuse_states("delta rule", initial_state, output_final_state and torch.is_grad_enabled())
    kwargs = {name: x for name, x in kwargs.items() if name != "cu_seqlens"}

    def call(tensors: Sequence[Tensor], continues: bool) -> Computed:
        q, k, v, g, beta = tensors
        heads, (key_dim, value_dim) = v.shape[2], (k.shape[3], v.shape[3])
        begin = None
        if continues:
            v = torch.cat([v, v.new_zeros((*v.shape[:3], key_dim))], dim=3)
            # Not in the dtype of q: kernels keep states in float32.
            zeros = torch.zeros(key_dim, value_dim, dtype=torch.float32, device=v.device)
            identity = torch.eye(key_dim, dtype=torch.float32, device=v.device)
            begin = torch.cat([zeros, identity], dim=1).expand(len(v), heads, -1, -1).contiguous()
        told = {"g": g, "beta": beta, "initial_state": begin, "output_final_state": True}
        out, final = original(q, k, v, *args, **told, **kwargs)
        if not continues:
            return Computed(out, final, final.new_zeros((*final.shape[:3], key_dim)), None)
        reach = out[..., value_dim:].to(final.dtype)
        return Computed(
            out[..., :value_dim],
            final[..., :value_dim].contiguous(),
            final[..., value_dim:].contiguous(),
            lambda state: torch.einsum("blhk,bhkv->blhv", reach, state),
        )

    return recurrence(sharding, (query, key, value, g, beta), call, True, 1, output_final_state)


def refuse_states(name: str, initial_state: Tensor | None, output_final_state: bool) -> None:
    if initial_state is not None or output_final_state:
        raise RingConfigError(
            f"{name}: expected a call without a cache on a ring, got one that passes a state on; pass"
            " use_cache=False, or generate with engine.ring.off()"
        )


def mamba2(
    original: Original, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int,
    *args: Any, D: Tensor | None = None, z: Tensor | None = None, dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None, dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")), return_final_states: bool = False, **kwargs: Any,
) -> Any:  # fmt: skip
    """Compute Mamba 2's scan of x [B, S, H, P], dt [B, S, H], A [H], B and C [B, S, G, N]."""
    sharding = sharding_of(kwargs)
    told = {"D": D, "dt_bias": dt_bias, "dt_softplus": dt_softplus, "dt_limit": dt_limit}
    if sharding is None:
        told |= {"z": z, "initial_states": initial_states, "return_final_states": return_final_states}
        return original(x, dt, A, B, C, chunk_size, *args, **told, **kwargs)
    refuse_states("Mamba 2", initial_states, return_final_states and torch.is_grad_enabled())
    kwargs = {name: x for name, x in kwargs.items() if name != "seq_idx"}

    def call(tensors: Sequence[Tensor], continues: bool) -> Computed:
        x, dt, B, C = tensors
        out, final = original(x, dt, A, B, C, chunk_size, *args, **told, return_final_states=True, **kwargs)
        decays = torch.exp(_summed_steps(dt, A, dt_bias, dt_softplus, dt_limit))  # [b, L, H]
        transition = decays[:, -1, :, None, None].to(final.dtype)

        def reach(state: Tensor) -> Tensor:
            of_heads = C.to(state.dtype).repeat_interleave(x.shape[2] // C.shape[2], dim=2)
            return torch.einsum("blhn,bhpn->blhp", of_heads * decays[..., None].to(state.dtype), state)

        return Computed(out, final, transition, reach if continues else None)

    out, state = recurrence(sharding, (x, dt, B, C), call, False, 1, return_final_states)
    out = out if z is None else out * F.silu(z)
    return (out, state) if return_final_states else out


def _summed_steps(
    dt: Tensor, A: Tensor, bias: Tensor | None, softplus: bool, limit: tuple[float, float]
) -> Tensor:
    """Return A times the sum of the step sizes up to each token, [b, L, H], float32 at least."""
    dt = dt if bias is None else dt + bias.to(dt.dtype)
    dt = F.softplus(dt) if softplus else dt
    dt = dt.clamp(min=limit[0], max=limit[1])
    dtype = torch.promote_types(dt.dtype, torch.float32)
    return (A.to(dtype) * dt.to(dtype)).cumsum(dim=1)


def mamba1(
    original: Original, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, *args: Any,
    D: Tensor | None = None, z: Tensor | None = None, delta_bias: Tensor | None = None,
    delta_softplus: bool = False, return_last_state: bool = False, **kwargs: Any,
) -> Any:  # fmt: skip
    """Compute Mamba's selective scan: x and dt [B, C, S], A [C, N], B and C [B, N, S]; states [B, C, N]."""
    sharding = sharding_of(kwargs)
    told = {"D": D, "delta_bias": delta_bias, "delta_softplus": delta_softplus}
    if sharding is None:
        told |= {"z": z, "return_last_state": return_last_state}
        return original(x, dt, A, B, C, *args, **told, **kwargs)
    refuse_states("Mamba", None, return_last_state and torch.is_grad_enabled())

    def call(tensors: Sequence[Tensor], continues: bool) -> Computed:
        x, dt, B, C = tensors
        out, final = original(x, dt, A, B, C, *args, **told, return_last_state=True, **kwargs)
        dt = dt if delta_bias is None else dt + delta_bias.to(dt.dtype)[:, None]
        dt = F.softplus(dt) if delta_softplus else dt
        dtype = torch.promote_types(final.dtype, torch.float32)
        steps, rates = dt.to(dtype).cumsum(dim=2), A.to(dtype)  # [b, C, L], [C, N]

        def reach(state: Tensor) -> Tensor:
            # State by state, since [b, C, L, N] is N times an activation.
            parts = [
                torch.exp(rates[:, n, None] * steps) * (state[..., n, None] * C[:, n, None].to(dtype))
                for n in range(rates.shape[1])
            ]
            return sum(parts[1:], parts[0])

        transition = torch.exp(rates * steps[..., -1:])
        return Computed(out, final.to(dtype), transition, reach if continues else None)

    out, state = recurrence(sharding, (x, dt, B, C), call, False, 2, return_last_state)
    out = out if z is None else out * F.silu(z)
    return (out, state) if return_last_state else out


def not_fused(original: Original, *args: Any, **kwargs: Any) -> Any:
    """Return None on a ring: the layer then calls the convolution and the scan one after the other."""
    return original(*args, **kwargs) if sharding_of(kwargs) is None else None
