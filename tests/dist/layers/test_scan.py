"""`ring_scan` and `halo` against one process, in float64: outputs and gradients on several rings and layouts.

The layers are written token by token: a delta rule, whose transitions are matrices, and a decay, whose
transitions are diagonals, behind a short convolution and a look-ahead. Tokens do not divide by the ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_ring import (
    Causal,
    Documents,
    RingMesh,
    RingPeerError,
    gather_sequence,
    halo,
    make_layout,
    ring_scan,
    shard_sequence,
    shift_sequence,
)
from ds_ring.layers.scan import halo as halo_module
from ds_ring.layers.scan import scan
from ds_ring.layers.scan.context import scan_context
from tests.dist.harness import Pool, catch_refusal
from tests.dist.one_process import Layer, same_as_one_process

B, T, K, V = 2, 46, 3, 4
WIDTH = 4  # of the convolution
IDS = [0] * 5 + [1] * 6 + [2] * 2 + [3] * 20 + [4] * 7 + [-1] * 6  # borders within halos, too


def inputs() -> dict[str, Tensor]:
    """Return keys, values, decays and weights of the layer, float64."""
    torch.manual_seed(0)
    arguments = {
        "k": torch.nn.functional.normalize(torch.randn(B, T, K, dtype=torch.float64), dim=-1),
        "v": torch.randn(B, T, V, dtype=torch.float64),
        "decay": torch.rand(B, T, K, dtype=torch.float64) * 0.3 + 0.7,
        "weight": torch.randn(WIDTH + 1, dtype=torch.float64),
    }
    return {name: x.requires_grad_() for name, x in arguments.items()}


def step(state: Tensor, k: Tensor, v: Tensor, decay: Tensor, matrix: bool) -> Tensor:
    """Return the state [B, K, V] after one token: a delta rule or a decay."""
    if not matrix:
        return state * decay[..., None] + k[..., None] * v[:, None]
    return state + k[..., None] * (v - torch.einsum("bk,bkv->bv", k, state))[:, None]


def through(state: Tensor, x: dict[str, Tensor], tokens: range, matrix: bool) -> tuple[list[Tensor], Tensor]:
    """Return the states after each of some tokens, and the last one."""
    states = []
    for t in tokens:
        state = step(state, x["k"][:, t], x["v"][:, t], x["decay"][:, t], matrix)
        states.append(state)
    return states, state


def alone(x: dict[str, Tensor], ids: list[int] | None, matrix: bool) -> Tensor:
    """Return [B, T, V] on one process: convolve values and one token of look-ahead, then scan."""
    ids = ids or [0] * T
    v = torch.zeros_like(x["v"])
    for t in range(T):
        around = range(max(0, t - WIDTH + 1), min(T, t + 2))
        terms = [x["weight"][WIDTH - 1 + u - t] * x["v"][:, u] for u in around if ids[u] == ids[t]]
        v[:, t] = sum(terms)
    state, out = torch.zeros(B, K, V, dtype=torch.float64), []
    for t in range(T):
        if t and ids[t] != ids[t - 1]:
            state = torch.zeros_like(state)
        state = step(state, x["k"][:, t], v[:, t], x["decay"][:, t], matrix)
        out.append(torch.einsum("bk,bkv->bv", x["k"][:, t], state))
    return torch.stack(out, dim=1)


def layer(x: dict[str, Tensor], context: Any, matrix: bool, compiled: bool = False) -> Tensor:
    """Return the local [B, S, V] of `alone`, from shards; `compiled` makes a graph around each operator."""
    named = {"layout": context.layout, "mesh": context.mesh, "documents": context.documents}

    def look_beside(v: Tensor) -> Tensor:
        return halo(v * 1, WIDTH - 1, 1, dim=1, **named)

    def scanned(moves: Tensor, finals: Tensor) -> Tensor:
        return 2 * ring_scan(moves, finals / 2, matrix=matrix, **named)

    if compiled:
        look_beside, scanned = (
            torch.compile(item, fullgraph=True, backend="aot_eager") for item in (look_beside, scanned)
        )
    beside = look_beside(x["v"])  # [B, R, WIDTH, V]
    zeros, v = torch.zeros_like(x["v"][:, :1]), torch.zeros_like(x["v"])
    for piece in context.pieces:
        local = x["v"][:, piece.slot : piece.slot + piece.length]
        front = beside[:, piece.run, : WIDTH - 1] if piece.is_first else zeros.expand(-1, WIDTH - 1, -1)
        last = beside[:, piece.run, WIDTH - 1 :] if piece.is_last else zeros
        whole = torch.cat([front, local, last], dim=1)
        parts = [x["weight"][i] * whole[:, i : i + piece.length] for i in range(WIDTH + 1)]
        v = torch.cat([v[:, : piece.slot], sum(parts), v[:, piece.slot + piece.length :]], dim=1)
    x = x | {"v": v}
    zero = torch.zeros(B, K, V, dtype=torch.float64)
    maps: dict[int, tuple[Tensor, Tensor]] = {}
    for piece in context.pieces:
        tokens = range(piece.slot, piece.slot + piece.length)
        if matrix:  # the map of the identity, without values
            still = x | {"v": torch.zeros(B, x["v"].shape[1], K, dtype=torch.float64)}
            move = through(torch.eye(K, dtype=torch.float64).expand(B, K, K), still, tokens, True)[1]
        else:
            move = x["decay"][:, list(tokens)].prod(dim=1)[..., None]
        maps[piece.run] = move, through(zero, x, tokens, matrix)[1]
    moves, finals = (torch.stack([pair[i] for pair in maps.values()]) for i in (0, 1))
    starts = scanned(moves, finals)
    out = torch.zeros(B, x["v"].shape[1], V, dtype=torch.float64)
    for piece in context.pieces:
        tokens = range(piece.slot, piece.slot + piece.length)
        states = through(starts[piece.run] if piece.is_first else zero, x, tokens, matrix)[0]
        result = torch.einsum("bsk,sbkv->bsv", x["k"][:, list(tokens)], torch.stack(states))
        out = torch.cat([out[:, : piece.slot], result, out[:, piece.slot + piece.length :]], dim=1)
    return out


def on_a_ring(mesh: RingMesh, name: str, packed: bool, matrix: bool, compiled: bool = False) -> Layer:
    ids = IDS if packed else None
    sizes = {"ring_size": mesh.ring_size, "multiple_of": mesh.ulysses_size}
    layout = make_layout(name, tokens=T, pattern=Documents(IDS), **sizes)
    context = scan_context(layout, mesh, Documents(ids) if ids else None)
    return Layer(
        inputs(),
        lambda **x: alone(x, ids, matrix),
        lambda **x: layer(x, context, matrix, compiled),
        mesh, layout, dim=1, parameters=["weight"],
    )  # fmt: skip


@pytest.mark.day(
    "1-zigzag-1-True-True",
    "2-zigzag-1-True-False",
    "3-contiguous-1-True-True",
    "4-balanced-1-False-True",
    "4-zigzag-2-True-False",
)
@pytest.mark.parametrize("matrix", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("world_size", "layout", "ulysses"),
    [(1, "zigzag", 1), (2, "zigzag", 1), (3, "contiguous", 1), (4, "zigzag", 1), (4, "balanced", 1),
     (4, "zigzag", 2)],
)  # fmt: skip
def test_exact(
    rank_pool: Pool, world_size: int, layout: str, ulysses: int, packed: bool, matrix: bool
) -> None:
    case = layout, packed, matrix
    same_as_one_process(rank_pool(world_size), on_a_ring, case, ulysses=ulysses, count=5 - matrix)


def predict_ahead(
    ids: Tensor,
    labels: Tensor,
    ahead: Callable[[Tensor, int, float], Tensor],
    embedding: Tensor,
    join: Tensor,
) -> Tensor:
    """The losses of two predictions of DeepSeek-V3's kind, from a token and from the next one's embedding."""
    hidden = embedding[ids].sin()
    both = torch.cat([hidden, ahead(embedding[ids], 1, 0.0)], dim=-1) @ join
    behind = ahead(both, -2, 0.5)  # a token shift, over more than one border
    predicted = ((hidden, ahead(labels, 0, -100)), (both + behind, ahead(labels, 1, -100)))
    return sum(  # type: ignore[return-value]
        torch.nn.functional.cross_entropy((x @ embedding.T).mT, wanted, reduction="none")
        for x, wanted in predicted
    )


def multi_token_prediction(mesh: RingMesh, name: str, packed: bool) -> Layer:
    torch.manual_seed(0)
    shapes = {"embedding": (7, 6), "join": (12, 6)}
    weights = {key: torch.randn(*shape, dtype=torch.float64) for key, shape in shapes.items()}
    ids = torch.randint(7, (B, T))
    documents = Documents(IDS) if packed else None
    numbers = torch.tensor(IDS if packed else [0] * T)

    def by_slices(x: Tensor, offset: int, fill: float) -> Tensor:
        result = torch.full_like(x, fill)
        for t in range(T):
            if 0 <= t + offset < T and numbers[t + offset] == numbers[t] >= 0:  # -1 is padding
                result[:, t] = x[:, t + offset]
        return result

    sizes = {"ring_size": mesh.ring_size, "multiple_of": mesh.ulysses_size}
    layout = make_layout(name, tokens=T, pattern=Causal(), **sizes)
    labels, place = by_slices(ids, 1, -100), {"layout": layout, "mesh": mesh, "dim": 1}
    mine, following = (shard_sequence(x, pad_value=pad, **place) for x, pad in ((ids, 0), (labels, -100)))

    def shifted(x: Tensor, offset: int, fill: float) -> Tensor:
        return shift_sequence(x, offset, documents=documents, fill=fill, **place) if offset else x

    return Layer(
        weights,
        partial(predict_ahead, ids, labels, lambda x, n, fill: by_slices(x, n, fill) if n else x),
        partial(predict_ahead, mine, following, shifted),
        mesh, layout, dim=1, parameters=["embedding", "join"],
    )  # fmt: skip


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ["zigzag", "contiguous", "balanced"])
@pytest.mark.parametrize(("world_size", "ulysses_size"), [(2, 1), (4, 1), (4, 2)])
@pytest.mark.covering(1)
def test_multi_token_prediction_is_exact(
    rank_pool: Pool, world_size: int, ulysses_size: int, name: str, packed: bool
) -> None:
    pool = rank_pool(world_size)
    same_as_one_process(pool, multi_token_prediction, (name, packed), ulysses=ulysses_size, count=3)


def shifted_padding(rank: int, world_size: int) -> list[Tensor]:
    """Tokens moved by some offsets, with two runs of padding inside and at the end; 7 where there is none."""
    mesh = RingMesh.from_world(world_size)
    documents = Documents([0] * 5 + [-1] * 9 + [1] * 20 + [2] * 3 + [-1] * 9)
    layout = make_layout("zigzag", tokens=T, ring_size=world_size)
    place: dict[str, Any] = {"dim": 1, "layout": layout, "mesh": mesh}
    mine = shard_sequence(torch.arange(100, 100 + T)[None], **place)
    return [
        gather_sequence(shift_sequence(mine, offset, documents=documents, fill=7, **place), **place)
        for offset in (1, -1, 4)
    ]


@pytest.mark.situation("padding", "shift_sequence of labels with documents of padding, id -1")
def test_padding_gets_the_fill_and_not_its_neighbour(rank_pool: Pool) -> None:
    ids = [0] * 5 + [-1] * 9 + [1] * 20 + [2] * 3 + [-1] * 9
    for result in rank_pool(2).run(shifted_padding):
        for offset, got in zip((1, -1, 4), result, strict=True):
            inside = [0 <= t + offset < T and ids[t + offset] == ids[t] >= 0 for t in range(T)]
            assert got[0].tolist() == [100 + t + offset if inside[t] else 7 for t in range(T)]


@pytest.mark.night
def test_torch_compile_sees_one_operator_each(rank_pool: Pool) -> None:
    """A function around each is one graph, forward and backward."""
    same_as_one_process(rank_pool(2), on_a_ring, ("zigzag", True, False, True), count=5)


def test_masks_are_made_once_for_all_layers_of_a_batch() -> None:
    """A scan of any shape reads the same memory; another dtype has its own."""
    mesh = RingMesh.single()
    context = scan_context(make_layout("zigzag", tokens=T, ring_size=1), mesh, Documents(IDS))
    first, again = (
        context.masks(torch.ones(context.own_runs, B, K, V)),
        context.masks(torch.ones(context.own_runs, 5)),
    )
    assert [x.data_ptr() for x in first] == [x.data_ptr() for x in again]
    assert [x.shape for x in first] == [(context.own_runs, 1, 1, 1)] * 2
    double = context.masks(torch.ones(context.own_runs, dtype=torch.float64))
    assert [x.dtype for x in double] == [torch.float64] * 2
    another = scan_context(context.layout, mesh, Documents([0] * T))  # of the next batch
    assert another.masks(torch.ones(1))[0].data_ptr() != first[0].data_ptr()


def bytes_of(rank: int, world_size: int, tokens: int) -> int:
    """Bytes that this rank sends in one scan of `tokens` tokens, forward and backward."""
    mesh = RingMesh.from_world(world_size)
    context = scan_context(make_layout("zigzag", tokens=tokens, ring_size=world_size), mesh)
    moves = torch.rand(context.own_runs, 1, K, K, requires_grad=True)
    finals = torch.rand(context.own_runs, 1, K, V, requires_grad=True)
    ring_scan(moves, finals, matrix=True, layout=context.layout, mesh=mesh).sum().backward()
    return context.exchange.counters.bytes_sent


def test_bytes_of_a_scan_do_not_depend_on_the_length(rank_pool: Pool) -> None:
    few, many = (rank_pool(4).run(bytes_of, tokens) for tokens in (64, 1 << 20))
    assert few == many
    assert min(few) > 0


def refused(rank: int, world_size: int, what: str) -> str:
    """Return the error that this rank gets; rank 1 alone is at fault, or all ranks are."""
    mesh = RingMesh.from_world(world_size)
    layout = make_layout("striped" if what == "striped" else "zigzag", tokens=T, ring_size=world_size)
    named: dict[str, Any] = {"layout": layout, "mesh": mesh}
    x = torch.zeros(B, layout.local_tokens, V)
    moves, finals = torch.ones(2 - rank, B, 1, 1), torch.ones(2 - rank, B, K, V)
    half = [torch.float32, torch.float16][rank]
    calls: dict[str, Callable[[], Any]] = {
        "striped": lambda: halo(x, 3, dim=1, **named),
        "documents": lambda: halo(x, 3, dim=1, documents=Documents(IDS[:-1]), **named),
        "slots": lambda: halo(x[:, : layout.local_tokens - rank], 3, dim=1, **named),
        "width": lambda: halo(x, 3 + rank, dim=1, **named),
        "nothing": lambda: halo(x, 0, dim=1, **named),
        "runs": lambda: ring_scan(moves, torch.ones(2, B, K, V), **named),
        "half": lambda: ring_scan(moves.to(half), finals.to(half), **named),
        "matrix": lambda: ring_scan(moves, finals, matrix=True, **named),
    }
    return catch_refusal(calls[what])


@pytest.mark.parametrize(
    ("what", "of_both", "says"),
    [
        ("striped", True, "RingLayoutError: striped layout of 46 tokens over 2 ranks: expected shards of"),
        ("documents", True, "RingPatternError: documents: expected 46 ids, got 45"),
        ("slots", False, "RingShapeError: halo: expected 23 slots"),
        ("width", True, "RingMismatchError: the ranks of this sequence call ds_ring with different"),
        ("nothing", True, "RingShapeError: halo: expected before or after above 0"),
        ("runs", False, "RingShapeError: ring_scan: expected transition and increment [R, ...]"),
        ("half", False, "RingShapeError: ring_scan: transition: expected float32 or float64"),
        ("matrix", True, "RingShapeError: ring_scan: expected transition and increment [R, ..., K, K]"),
    ],
)
def test_misfits_are_refused_on_every_rank(rank_pool: Pool, what: str, of_both: bool, says: str) -> None:
    first, second = rank_pool(2).run(refused, what)
    assert second.startswith(says), second
    assert first.startswith(says if of_both else "RingMismatchError: ring rank 1 refused its own input"), (
        first
    )


def failed(rank: int, world_size: int, where: str) -> tuple[str, int | None, str, float]:
    """Raise in the local work of one call on rank 1; return each rank's error, whom it names, and seconds."""
    mesh = RingMesh.from_world(world_size)
    layout = make_layout("contiguous", tokens=T, ring_size=world_size)
    named: dict[str, Any] = {"layout": layout, "mesh": mesh, "hop_timeout_s": 20.0}
    x = torch.zeros(B, layout.local_tokens, V, requires_grad=True)
    maps = [torch.ones(1, B, K, V, requires_grad=True) for _ in range(2)]
    operation, _, backward = where.partition(" ")
    module, part = {"halo": (halo_module, "halo_messages"), "scan": (scan, "compose")}[operation]
    original, started = getattr(module, part), time.monotonic()

    def fails(*_: Any) -> Any:
        raise ZeroDivisionError("on purpose")

    def call() -> Tensor:
        return halo(x, 3, dim=1, **named) if operation == "halo" else ring_scan(*maps, **named)

    try:
        out = call() if backward else None
        if rank == 1:
            setattr(module, part, fails)
        if out is not None:
            out.sum().backward()
        call()
        call()  # a rank that needed nothing of rank 1 hears of it here
    except (RingPeerError, ZeroDivisionError) as error:
        seconds = time.monotonic() - started
        setattr(module, part, original)
        torch.distributed.barrier()  # rank 1 stays, so that the others hear of its error and not of its end
        return type(error).__name__, getattr(error, "peer", None), str(error), seconds
    return "no error", None, "", 0.0


@pytest.mark.parametrize("where", ["halo", "halo backward", "scan", "scan backward"])
def test_an_error_on_one_rank_is_told_to_the_others_at_once(rank_pool: Pool, where: str) -> None:
    result = rank_pool(3).run(failed, where)
    assert result[1][0] == "ZeroDivisionError"
    for kind, peer, text, seconds in (result[0], result[2]):
        assert (kind, peer) == ("RingPeerError", 1) and "ZeroDivisionError in call" in text, result
        assert seconds < 5, result
