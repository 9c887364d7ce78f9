"""Rings of every size from 1 to P in one step: losses and gradients of one process in float64, four peers a rank.

The model attends by `session.attention()`, so that nothing is rounded to float32 on the way.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest.mock import patch

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import ds_ring
from ds_ring.comm.exchange import Exchange, Route
from ds_ring.data.dynamic_ring import assignment
from ds_ring.data.dynamic_ring.intervals import SubRings, are_linked
from ds_ring.data.dynamic_ring.sub_rings import BatchLengths, Division, SubRing
from ds_ring.data.loader import SampleOrder
from tests.calls import attend
from tests.dist.deepspeed_ranks import VOCABULARY, check_gradients
from tests.dist.harness import run_ranks
from tests.dist.test_dynamic_ring import Machine
from tests.sessions import session_of

HEADS, KV_HEADS, WIDTH, HEAD_DIM, LAYERS, LONGEST = 4, 2, 16, 4, 2, 80
BATCH = 3  # samples of a ring, of all its parts together


class Own(nn.Module):
    """Grouped-query attention and learned positions; float64. Attends by `attention`."""

    def __init__(self, attention: Callable[[], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LONGEST, WIDTH)
        heads = HEADS + 2 * KV_HEADS
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, heads * HEAD_DIM) for _ in range(LAYERS))
        self.out = nn.ModuleList(nn.Linear(HEADS * HEAD_DIM, WIDTH) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.attention = attention
        self.double()

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = self.tokens(input_ids) + self.places(position_ids)
        attention = self.attention()
        for qkv, out in zip(self.qkv, self.out, strict=True):
            q, k, v = (
                part.unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)
                for part in qkv(x).split([n * HEAD_DIM for n in (HEADS, KV_HEADS, KV_HEADS)], dim=-1)
            )
            x = x + out(attention(3 * q, k, v).transpose(1, 2).flatten(2)).tanh()
        return self.head(x)


def alone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class Samples(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Lengths that no ring size divides; a third of the tokens has no label."""

    def __init__(self, count: int) -> None:
        drawn = torch.Generator().manual_seed(5)
        self.lengths = [5 + 11 * index % (LONGEST - 5) for index in range(count)]
        self.texts = [torch.randint(1, VOCABULARY, (n,), generator=drawn) for n in self.lengths]

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = self.texts[index]
        return {"input_ids": ids, "labels": ids.masked_fill(torch.arange(len(ids)) % 3 == 1, -100)}


def all_sizes(ranks: int) -> list[tuple[int, ...]]:
    """Divisions that have rings of every size, at changing places."""
    pairs = [(ranks - size, size) for size in range(1, ranks // 2 + 1)]
    result = [(ranks,), *(pair[:: 1 if turn % 2 else -1] for turn, pair in enumerate(pairs))]
    return [*result, (1, ranks - 2, 1)]


def divisions(ranks: int) -> Iterator[Division]:
    for sizes in all_sizes(ranks):
        firsts = itertools.accumulate(sizes, initial=0)
        rings = [(first, size) for first, size in zip(firsts, sizes, strict=False)]
        yield Division(tuple(SubRing(*ring, ()) for ring in rings), 0.0)


class Step(NamedTuple):
    losses: list[float]
    gradients: dict[str, Tensor]
    sizes: list[int]
    peers: set[int]


def one_step(rank: int, world: int, ring: int, section: dict[str, Any]) -> Step:
    """A step of as many batches as there are divisions; rings take samples in turns."""
    planned, result = all_sizes(ring), Step([], {}, [], set())
    texts = Samples(BATCH * len(planned) * world // ring)
    coming = divisions(ring)

    def divide(batch: BatchLengths, *_: Any) -> Division:
        rings = next(coming).rings
        mine = [tuple(range(len(batch.lengths)))[n :: len(rings)] for n in range(len(rings))]
        return Division(tuple(x._replace(samples=y) for x, y in zip(rings, mine, strict=True)), 0.0)

    def start(self: Exchange, route: Route, *extra: Any) -> Any:
        result.peers.update(*route.peers)
        return started(self, route, *extra)

    mesh = ds_ring.RingMesh.from_world(ring)
    session = session_of(mesh, float(world), dynamic_ring=True, **section)
    session.dynamic.rings, session.dynamic.times = SubRings(mesh), Machine()
    started, model = Exchange.start, Own(session.attention)
    with patch.object(assignment, "divide", divide), patch.object(Exchange, "start", start):
        for batch in session.loader(texts, BATCH, lengths=texts.lengths, most_tokens=10**6):
            logits = model(batch["input_ids"], batch["position_ids"])
            counted = round(float(batch["num_items_in_batch"]) * world)
            labels = batch["shift_labels"].flatten()
            loss = cross_entropy(logits.flatten(0, 1), labels, ignore_index=-100, reduction="sum") / counted
            (loss / len(planned)).backward()
            total = loss.detach().clone()
            dist.all_reduce(total)
            result.losses.append(float(total))
            result.sizes.append(session.batches.current.mesh.ring_size)
    for (
        name,
        parameter,
    ) in model.named_parameters():  # ranks without a token of a batch have no gradient of it
        result.gradients[name] = parameter.grad
        dist.all_reduce(result.gradients[name])
    return result


def step_alone(world: int, ring: int) -> Step:
    """Each sample by itself on one process."""
    model, planned, losses = Own(lambda: alone), all_sizes(ring), []
    texts = Samples(BATCH * len(planned) * world // ring)
    for samples in batches(texts, world // ring):
        counted = sum(int((texts[n]["labels"][1:] != -100).sum()) for n in samples)
        total = 0.0
        for n in samples:
            ids, labels = texts[n]["input_ids"], texts[n]["labels"]
            logits = model(ids[None], torch.arange(len(ids))[None])[0, :-1]
            loss = cross_entropy(logits, labels[1:], ignore_index=-100, reduction="sum") / counted
            (loss / len(planned)).backward()
            total += float(loss.detach())
        losses.append(total)
    return Step(
        losses, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, [], set()
    )


def batches(texts: Samples, replicas: int) -> Iterator[list[int]]:
    """The samples of each batch of the world."""
    extra: dict[str, Any] = {"shuffle": False, "seed": 0, "drop_last": False, "lengths": texts.lengths}
    orders = (SampleOrder(len(texts), BATCH, (item, replicas), **extra) for item in range(replicas))
    return ([index for item in batch for index in item] for batch in zip(*orders, strict=True))


PACKED = {"pattern": {"documents": True}}
CASES = {
    "4 padded": (4, 4, {}),
    "4 packed": (4, 4, PACKED),
    "6 padded": (6, 6, {"layout": "contiguous"}),
    "6 packed": (6, 6, PACKED),
    "6 as two of 3": (6, 3, {}),
    "8 padded": (8, 8, {"layout": "zigzag"}),
    "8 packed": (8, 8, PACKED),
    "8 all_gather": (8, 8, {"transport": "all_gather"}),
    "6 reproducible": (6, 6, {"transport": "reproducible", "block_size": 16}),
    "6 direct": (6, 6, {"transport": "direct"}),
    "4 packed, fastest": (4, 4, PACKED | {"transport": "fastest"}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.day("4 padded")
def test_all_sizes_in_one_step_are_exact(rank_pool: Any, case: str) -> None:
    world, ring, section = CASES[case]
    by_rank = rank_pool(world).run(one_step, ring, section, timeout_s=240)
    expected = step_alone(world, ring)
    assert {size for result in by_rank for size in result.sizes} == set(range(1, ring + 1))
    for rank, result in enumerate(by_rank):
        assert result.losses == pytest.approx(expected.losses, rel=1e-13)
        first = rank - rank % ring
        numbers = {peer - first for peer in result.peers}
        linked = {(rank - first + apart) % ring for apart in (-2, -1, 1, 2)}
        is_direct = section.get("transport") in ("reproducible", "direct", "fastest")
        assert numbers <= linked or is_direct, (rank, result.peers)
    gradients = by_rank[0].gradients
    assert {x.dtype for x in gradients.values()} == {torch.float64}
    check_gradients(gradients, expected.gradients, 1e-13)


def sockets(rank: int, world: int, lazy: bool) -> list[tuple[set[int], int]]:
    """Peers with an open socket, and how many: of the groups as made, and after passes on all intervals."""
    os.environ["TORCH_GLOO_LAZY_INIT"] = str(int(lazy))
    owners: list[Any] = [None] * world
    dist.all_gather_object(owners, os.getpid())
    before = opened()
    mesh = ds_ring.RingMesh.from_world(world)
    dist.barrier()
    result = [peers_of(opened() - before, owners)]
    rings = SubRings(mesh)
    for first in range(world):
        for ranks in range(1, world - first + 1):
            item = rings.get_ring([(first, ranks)])
            if first <= rank < first + ranks:
                layout = ds_ring.make_layout("zigzag", tokens=40, ring_size=ranks)
                q, k, v = (torch.randn(1, 2, layout.local_tokens, 4, requires_grad=True) for _ in range(3))
                out = attend(q, k, v, pattern=ds_ring.Causal(), layout=layout, mesh=item)
                ds_ring.gather_sequence(out, layout, mesh=item, dim=2).sum().backward()
    dist.barrier()
    result.append(peers_of(opened() - before, owners))
    dist.barrier()
    return result


def opened() -> set[tuple[Any, Any]]:
    """The addresses, here and there, of this process's connections."""
    all_of = psutil.Process().net_connections("tcp")
    return {(item.laddr, item.raddr) for item in all_of if item.status == "ESTABLISHED"}


def peers_of(sockets: set[tuple[Any, Any]], pids: list[int]) -> tuple[set[int], int]:
    ends = {(item.laddr, item.raddr): item.pid for item in psutil.net_connections("tcp") if item.raddr}
    result = [pids.index(ends[there, here]) for here, there in sockets if ends.get((there, here)) in pids]
    return set(result), len(result)


@pytest.mark.night
@pytest.mark.parametrize("lazy", [True, False])
def test_open_sockets(lazy: bool) -> None:
    """gloo connects all ranks of a group when it makes it, unless it is told to wait for the first message.

    Then rank 3 has sockets to 1, 2, 4 and 5 after passes, headers and gathering on all its intervals: two
    each, one of payloads and one of headers.
    """
    for rank, (built, after) in enumerate(run_ranks(sockets, 8, lazy, timeout_s=120)):
        if not lazy:
            assert built == after == (set(range(8)) - {rank}, 14)
            continue
        assert built == (set(), 0)
        linked = {second for second in range(8) if second != rank and are_linked(rank, second, 8)}
        assert after[0] <= linked and after[1] == 2 * len(after[0]), (rank, after)
        assert after[0] == linked or rank in (0, 1, 6, 7), "no ring closes beyond the ends"
