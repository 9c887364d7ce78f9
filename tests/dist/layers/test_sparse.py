"""MoBA and NSA on a ring against dense attention, written from the papers, in float64: outputs and gradients.

Grouped queries, lengths that no block divides, blocks that borders of shards cut (MoBA), documents, windows of
compressed keys that reach over borders (NSA), NaN in slots of padding.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from ds_ring import (
    Causal,
    Documents,
    NsaSizes,
    RingError,
    RingMesh,
    make_layout,
    moba_attention,
    nsa_attention,
    ring_select,
    selected_attention,
    shard_sequence,
)
from ds_ring.layers.selection.selected_pass import SelectedPass
from ds_ring.layers.sparse import blocks as of_tokens
from ds_ring.layers.sparse import nsa as nsa_module
from ds_ring.measure.memory import measure_cpu_memory
from ds_ring.schedule.pieces import round_to_blocks
from tests.dist.harness import Pool
from tests.dist.one_process import Layer, compare_cases, same_as_one_process
from tests.reference import relative_error, worst

B, H, G, D, E = 2, 4, 2, 8, 6


def make(name: str, *shape: int) -> Tensor:
    """A global tensor, the same on every rank."""
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax attention [B, H, T, E] under a mask [B, H, T, K], and its probabilities; 0 for rows without keys."""
    k, v = (x.repeat_interleave(H // G, dim=1) for x in (k, v))
    scores = (q @ k.mT * D**-0.5).masked_fill(~mask, float("-inf"))
    scores = torch.where(mask.any(-1, keepdim=True), scores, 0.0)
    weights = scores.softmax(-1) * mask
    return weights @ v, weights


def best(scores: Tensor, k: int) -> Tensor:
    """Which of the last dimension are among the k best, the first of equal ones first; none of -inf."""
    order = scores.sort(dim=-1, descending=True, stable=True).indices[..., :k]
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order, True) & (scores > float("-inf"))


# --- MoBA ------------------------------------------------------------------------------------------

TOKENS = 83
IDS = np.repeat([0, 1, 2, -1], [30, 3, 41, 9])


def moba_alone(q: Tensor, k: Tensor, v: Tensor, size: int, top_k: int, ids: Any) -> Tensor:
    """Equations 2 to 6 of the paper, document by document."""
    mask = torch.zeros(B, H, TOKENS, TOKENS, dtype=torch.bool)
    edges = [0, *(np.flatnonzero(np.diff(ids)) + 1).tolist(), TOKENS]
    for start, end in pairwise(edges):
        if ids[start] < 0:
            continue
        places = torch.arange(end - start)
        blocks = torch.arange(-(-(end - start) // size))
        part = k[:, :, start:end].detach()
        means = torch.stack([part[:, :, places // size == i].mean(2) for i in blocks], dim=2)
        scores = q[:, :, start:end].detach() @ means.repeat_interleave(H // G, dim=1).mT
        block = (places // size)[:, None]
        scores = scores.masked_fill(blocks > block, float("-inf")).masked_fill(blocks == block, float("inf"))
        chosen = best(scores, top_k)[..., places // size]
        mask[:, :, start:end, start:end] = chosen & (places <= places[:, None])
    return dense(q, k, v, mask)[0]


def moba_inputs() -> dict[str, Tensor]:
    shapes = {"q": (B, H, TOKENS, D), "k": (B, G, TOKENS, D), "v": (B, G, TOKENS, E)}
    return {name: make(name, *shape) for name, shape in shapes.items()}


MOBA = [
    # layout, tokens of a block, blocks, documents
    ("zigzag", 7, 3, False),
    ("contiguous", 16, 2, True),
    ("balanced", 5, 4, True),
    ("zigzag", 50, 2, False),  # longer than a run
    ("contiguous", 6, 1000, False),  # all blocks: causal attention
    ("zigzag", 9, 1, False),  # the own block alone
]


def moba(mesh: RingMesh, name: str, size: int, top_k: int, packed: bool) -> Layer:
    ids = IDS if packed else np.zeros(TOKENS, dtype=int)
    layout = make_layout(name, tokens=TOKENS, ring_size=mesh.ring_size, pattern=Causal())
    attend = partial(
        moba_attention, layout=layout, mesh=mesh, block_size=size, top_k=top_k,
        documents=Documents(ids) if packed else None,
    )  # fmt: skip
    reference = partial(moba_alone, size=size, top_k=top_k, ids=ids)
    return Layer(moba_inputs(), reference, attend, mesh, layout, pad_value=torch.nan)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.day("4")
def test_moba_is_that_of_the_paper(rank_pool: Pool, size: int) -> None:
    same_as_one_process(rank_pool(size), moba, *MOBA, count=4)


# --- NSA -------------------------------------------------------------------------------------------

NSA = [
    # layout, tokens, window of compression, stride, block, blocks, first and local ones, window, keys by branch
    ("zigzag", 128, 8, 4, 8, 4, (1, 2), 11, True),
    ("contiguous", 125, 4, 4, 8, 3, (1, 1), 5, False),  # windows do not overlap; the last block is cut
    ("zigzag", 128, 4, 2, 16, 3, (0, 1), 200, True),
    ("contiguous", 64, 1, 1, 2, 5, (2, 2), 1, False),  # every token is a compressed key
]


class Compress(nn.Module):
    """A learned sum over the tokens of a window, with a place's own bias, behind a tanh."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.of_keys, self.of_values = (nn.Parameter(make(name, size)) for name in ("keys", "values"))
        self.place = nn.Parameter(make("place", size, D))

    def forward(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        item = torch.einsum("bgnld,l->bgnd", torch.tanh(keys + self.place), self.of_keys)
        return item, torch.einsum("bgnld,l->bgnd", values, self.of_values)


def nsa_inputs(tokens: int, by_branch: bool) -> dict[str, Tensor]:
    shapes = {"q": (B, H, tokens, D), "gates": (B, H, tokens, 3)}
    for i in range(3 if by_branch else 1):
        shapes |= {f"k{i}": (B, G, tokens, D), f"v{i}": (B, G, tokens, E)}
    return {name: make(name, *shape) for name, shape in shapes.items()}


def nsa_alone(case: tuple[Any, ...], q: Tensor, gates: Tensor, **leaves: Tensor) -> Tensor:
    """Equations 5 to 11 of the paper; those of blocks with their indices, which begin at 1."""
    _, tokens, size, stride, block, k, (first, local), window, by_branch = case
    last, t = 2 if by_branch else 0, torch.arange(tokens)
    begins = torch.arange((tokens - size) // stride + 1) * stride
    index = begins[:, None] + torch.arange(size)
    keys, values = compress(size, leaves, leaves["k0"][:, :, index], leaves["v0"][:, :, index])
    seen = (begins + size - 1 <= t[:, None]).expand(B, H, -1, -1)
    compressed, p = dense(q, keys, values, seen)
    blocks = -(-tokens // block)
    importance = torch.zeros(B, H, tokens, blocks, dtype=torch.float64)
    for j in range(1, blocks + 1):
        for m in range(block // stride):
            for n in range(size // stride):
                i = block // stride * j - m - n
                if 1 <= i <= p.shape[-1]:
                    importance[..., j - 1] += p.detach()[..., i - 1]
    importance = importance.unflatten(1, (G, -1)).sum(2)
    mine, number = (t // block)[:, None], torch.arange(blocks)
    importance = importance.masked_fill((number < first) | (number > mine - local), float("inf"))
    importance = importance.masked_fill(number > mine, float("-inf"))
    chosen = best(importance, k)[..., t // block] & (t <= t[:, None])
    of_blocks = dense(
        q, leaves[f"k{min(1, last)}"], leaves[f"v{min(1, last)}"], chosen.repeat_interleave(H // G, 1)
    )
    near = ((t <= t[:, None]) & (t > t[:, None] - window)).expand(B, H, -1, -1)
    of_window = dense(q, leaves[f"k{last}"], leaves[f"v{last}"], near)
    branches = torch.stack([compressed, of_blocks[0], of_window[0]], dim=-1)
    return (branches * gates.unsqueeze(3)).sum(-1)


def compress(size: int, leaves: dict[str, Tensor], keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """With a module's parameters, which are among the leaves."""
    module = Compress(size)
    weights = {name: leaves[name] for name, _ in module.named_parameters()}
    return functional_call(module, weights, (keys, values))  # type: ignore[no-any-return]


def nsa(mesh: RingMesh, *case: Any) -> Layer:
    name, tokens, size, stride, block, k, (first, local), window, by_branch = case
    layout = round_to_blocks(
        make_layout(name, tokens=tokens, ring_size=mesh.ring_size, pattern=Causal()), block
    )
    sizes = NsaSizes(size, stride, block, k, first, local, window)

    def attend(q: Tensor, gates: Tensor, **leaves: Tensor) -> Tensor:
        keys, values = ([leaves[f"{kind}{i}"] for i in range(3 if by_branch else 1)] for kind in "kv")
        return nsa_attention(
            q, keys if by_branch else keys[0], values if by_branch else values[0], gates, layout=layout,
            mesh=mesh, compress=partial(compress, size, leaves), sizes=sizes,
        )  # fmt: skip

    weights = {name: x.detach() for name, x in Compress(size).named_parameters()}
    inputs, reference = nsa_inputs(tokens, by_branch) | weights, partial(nsa_alone, case)
    return Layer(inputs, reference, attend, mesh, layout, parameters=[*weights], pad_value=torch.nan)


def nsa_in_parts(rank: int, world_size: int) -> list[dict[str, float]]:
    with mock.patch.object(nsa_module, "SCORED", 12):
        return compare_cases(rank, world_size, nsa, NSA, 1)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.day("4")
def test_nsa_is_that_of_the_paper(rank_pool: Pool, size: int) -> None:
    for cases in rank_pool(size).run(nsa_in_parts):
        assert [len(errors) for errors in cases] == [12, 8, 12, 8]
        assert worst(error for errors in cases for error in errors.values()) < 1e-12, cases


# --- faults ----------------------------------------------------------------------------------------


def see_all(self: Any, *arguments: Any) -> Tensor:
    """Tokens of the query's block behind it are seen."""
    self.last = torch.full_like(self.last, TOKENS - 1)
    return places(self, *arguments)


def count_once(self: Any, *arguments: Any) -> None:
    """A window counts once for a block, however much of it they share."""
    shared(self, *arguments)
    self.shared = torch.ones_like(self.shared)


def lose_halo(*arguments: Any) -> Any:
    """What lies on other ranks is left out of the means."""
    return halo(*arguments) * 0


halo, places, shared = of_tokens.halo_op, SelectedPass._places, nsa_module._Importance.__init__
FAULTS: dict[str, tuple[Any, str, Any]] = {
    "cut": (of_tokens, "halo_op", lose_halo),
    "future": (SelectedPass, "_places", see_all),
    "overlap": (nsa_module._Importance, "__init__", count_once),
}


def faulty(rank: int, world_size: int, layer: Any, case: Any, fault: str) -> float:
    with mock.patch.object(*FAULTS[fault]):
        return compare_cases(rank, world_size, layer, [case], 1)[0]["out"]


@pytest.mark.parametrize(
    ("layer", "fault", "case"), [(moba, "cut", MOBA[0]), (moba, "future", MOBA[-1]), (nsa, "overlap", NSA[0])]
)
def test_faults_are_found(rank_pool: Pool, layer: Any, fault: str, case: Any) -> None:
    assert rank_pool(2).run(faulty, layer, case, fault)[0] > 1e-3


def wrong(rank: int, world_size: int, what: str) -> str:
    """The error of this rank, after which a right call goes through."""
    ulysses = 2 if what == "ulysses" else 1
    mesh = RingMesh.from_world(world_size // ulysses, ulysses)
    layout = make_layout("zigzag", tokens=64, ring_size=mesh.ring_size)
    slots = layout.local_tokens // ulysses
    x = {name: torch.ones(1, heads, slots, 4) for name, heads in (("q", 4), ("k", 2), ("v", 2))}
    requested: dict[str, Any] = {"layout": layout, "mesh": mesh}
    of_moba: dict[str, Any] = {"block_size": 8, "top_k": 2}
    of_nsa: dict[str, Any] = {
        "gates": torch.ones(1, 4, slots, 3), "compress": lambda k, v: (k.mean(3), v.mean(3)),
        "sizes": NsaSizes(8, 4, 8, top_k=3, window=5),
    }  # fmt: skip
    run, arguments = (nsa_attention, of_nsa) if what.startswith("nsa") else (moba_attention, of_moba)
    changes: dict[str, Any] = {
        "striped": {"layout": make_layout("striped", tokens=64, ring_size=mesh.ring_size)},
        "no blocks": {"block_size": 0},
        "top_k": {"top_k": 2.0},
        "documents": {"documents": Documents([0] * 63)},
        "keys on rank 1": {"k": x["k"][:, :, rank:]},
        "top_k on rank 1": {"top_k": 2 + rank},
        "nsa cut": {"layout": make_layout("zigzag", tokens=60, ring_size=mesh.ring_size)},
        "nsa stride": {"sizes": NsaSizes(8, 3, 8, top_k=3, window=5)},
        "nsa zero": {"sizes": NsaSizes(8, 4, 0, top_k=3, window=5)},
        "nsa size": {"sizes": NsaSizes(12, 4, 8, top_k=3, window=5)},
        "nsa few": {"sizes": NsaSizes(8, 4, 8, top_k=2, window=5)},
        "nsa gates": {"gates": torch.ones(1, 4, slots, 2)},
        "nsa two": {"k": [x["k"]] * 2},
        "nsa compress": {"compress": lambda k, v: (k.mean(3), v)},
    }
    if what == "nsa cut":
        of_nsa["gates"] = torch.ones(1, 4, 30, 3)
        x = {name: item[:, :, :30] for name, item in x.items()}
    try:
        run(**(x | requested | arguments | changes.get(what, {})))
    except RingError as error:
        result = f"{type(error).__name__}: {error}"
    else:
        result = "not refused"
    if what not in ("ulysses", "nsa cut"):
        assert moba_attention(**x, **requested, **of_moba).shape == x["q"].shape
    mesh.close()
    return result


@pytest.mark.parametrize(
    ("what", "kind", "words"),
    [
        ("ulysses", "RingConfigError", "expected ulysses_size 1, got 2"),
        ("striped", "RingLayoutError", "expected shards of consecutive positions"),
        ("no blocks", "RingConfigError", "moba_attention: block_size: expected a positive integer, got 0"),
        ("top_k", "RingConfigError", "moba_attention: top_k: expected a positive integer, got 2.0"),
        ("documents", "RingPatternError", "documents: expected 64 ids"),
        ("keys on rank 1", "RingShapeError", "expected equal batch, heads and tokens"),
        ("top_k on rank 1", "RingMismatchError", "the ranks of this"),
        ("nsa cut", "RingLayoutError", "expected runs of whole blocks of 8 tokens"),
        ("nsa stride", "RingConfigError", "expected compressed_size <= block_size, multiples of stride"),
        ("nsa zero", "RingConfigError", "nsa_attention: block_size: expected a positive integer, got 0"),
        ("nsa size", "RingConfigError", "multiples of stride, got 12, 8 and 4"),
        ("nsa few", "RingConfigError", "expected top_k >= first_blocks + local_blocks, got"),
        ("nsa gates", "RingShapeError", "gates: expected floating (1, 4, 32, 3)"),
        ("nsa two", "RingConfigError", "one or three k and v, got 2, 3"),
        ("nsa compress", "RingShapeError", "compress: expected keys and values"),
    ],
)  # fmt: skip
def test_misfits_are_refused_on_every_rank(rank_pool: Pool, what: str, kind: str, words: str) -> None:
    first, second = rank_pool(2).run(wrong, what)
    assert second.startswith(kind) and words in second, second
    assert first.startswith("RingMismatchError" if "on rank 1" in what else kind), first


# --- what both are made of -------------------------------------------------------------------------


def blocks_as_tokens(rank: int, world_size: int) -> dict[str, float]:
    """Chosen blocks against the same choice as tokens, and head by head; scores that read positions."""
    mesh, x = RingMesh.from_world(world_size), moba_inputs()
    layout = make_layout("zigzag", tokens=TOKENS, ring_size=mesh.ring_size)
    place: dict[str, Any] = {"layout": layout, "mesh": mesh}
    size, local = 4, {name: shard_sequence(item, layout, mesh=mesh, dim=2) for name, item in x.items()}
    grad = shard_sequence(make("grad", B, H, TOKENS, E), layout, mesh=mesh, dim=2)
    positions = torch.from_numpy(layout.positions(mesh.ring_rank))
    firsts = torch.stack([positions // size * size, torch.zeros_like(positions)], dim=-1)
    firsts = torch.where((positions < size)[:, None] & (torch.arange(2) == 1), -1, firsts)  # each once
    firsts = torch.where(positions[:, None] < 0, -1, firsts).expand(B, -1, -1)
    tokens = (firsts.unsqueeze(-1) + torch.arange(size)).flatten(-2)
    tokens = torch.where((firsts < 0).repeat_interleave(size, -1) | (tokens > positions[:, None]), -1, tokens)
    errors, want = {}, None
    for name, chosen, extra in (
        ("tokens", tokens, {}),
        ("blocks", firsts, {"block_size": size}),
        ("of each head", firsts[:, None].expand(-1, H, -1, -1), {"block_size": size}),
        ("tokens of each head", tokens[:, None].expand(-1, H, -1, -1), {}),
    ):
        leaves = {key: local[key].clone().requires_grad_() for key in ("q", "k", "v")}
        out, lse = selected_attention(*leaves.values(), chosen, **place, return_lse=True, **extra)
        grads = torch.autograd.grad(out, [*leaves.values()], grad)
        result = {
            "out": out.detach(),
            "lse": lse.detach()[..., positions >= 0],
            **dict(zip("qkv", grads, strict=True)),
        }
        want = result if want is None else want
        errors[name] = max(relative_error(result[key], want[key]) for key in want)

    def nearest(rows: slice, keys: Tensor, where: Tensor) -> Tensor:
        return -(positions[rows, None] - where).abs().double().expand(B, -1, -1)

    best_two = ring_select(nearest, 2, local["k"].transpose(1, 2), with_positions=True, **place)
    here = torch.stack([positions, positions - 1], dim=-1).clamp_min(-1)
    errors["positions"] = float(bool((best_two != here).any()))
    for what, call in (
        ("sinks", lambda: selected_attention(
            *(local[key] for key in "qkv"), firsts[:, None].expand(-1, H, -1, -1), **place, block_size=size,
            sinks=torch.zeros(H, dtype=torch.float64),
        )),
        ("queries", lambda: selected_attention(
            local["q"][:, :, :3], local["k"], local["v"], firsts[:, :3], **place, block_size=size
        )),
        ("size", lambda: selected_attention(*(local[key] for key in "qkv"), firsts, **place, block_size=0)),
    ):  # fmt: skip
        with pytest.raises(RingError, match="no sinks where" if what == "sinks" else "block_size: expected"):
            call()
    mesh.close()
    return errors


def test_blocks_are_their_tokens_and_heads_choose_for_themselves(rank_pool: Pool) -> None:
    for errors in rank_pool(2).run(blocks_as_tokens):
        assert len(errors) == 5 and max(errors.values()) < 1e-12, errors


def peaks(rank: int, world_size: int, tokens: int) -> list[int]:
    """The most bytes of a forward and backward pass of each pattern."""
    mesh, result = RingMesh.from_world(world_size), []
    layout = make_layout("zigzag", tokens=tokens, ring_size=world_size)
    place: dict[str, Any] = {"layout": layout, "mesh": mesh}
    slots = layout.local_tokens

    def of_mean(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return k.mean(3), v.mean(3)

    for name in ("moba", "nsa"):
        with measure_cpu_memory() as memory:
            q, k, v = (torch.rand(1, heads, slots, 16, requires_grad=True) for heads in (4, 2, 2))
            if name == "moba":
                out = moba_attention(q, k, v, **place, block_size=64, top_k=3)
            else:
                gates = torch.ones(1, 4, slots, 3)
                out = nsa_attention(
                    q, k, v, gates, **place, compress=of_mean, sizes=NsaSizes(top_k=4, window=64)
                )
            out.sum().backward()
        result.append(memory.peak_bytes)
    mesh.close()
    return result


@pytest.mark.night
def test_memory_is_that_of_the_tokens_of_a_rank(rank_pool: Pool) -> None:
    of_two, of_four = rank_pool(2).run(peaks, 256), rank_pool(4).run(peaks, 512)
    for few, many in zip(zip(*of_two, strict=True), zip(*of_four, strict=True), strict=True):
        assert max(many) < 1.1 * max(few), (few, many)
