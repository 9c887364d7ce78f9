"""Transport "pull": the bits of messages, refusals on every rank, seeded faults, and nothing left behind."""

from __future__ import annotations

import gc
import os
import signal
import time
from typing import Any
from unittest import mock

import pytest
import torch

from ds_ring import Causal, RingError, RingMesh, make_layout, shard_sequence
from ds_ring.ops.context import make_ring_context
from ds_ring.ops.options import Options
from ds_ring.ops.ring_op import ring_attention_op
from ds_ring.plugin import KV_PAYLOADS
from ds_ring.ring.pool import Buffers
from ds_ring.transports.pull import shared_memory
from ds_ring.transports.pull import signals as pull
from ds_ring.transports.pull.shared_memory import READY, HostShared
from ds_ring.transports.pull.signals import SharedBuffersByDevice
from tests import calls
from tests.cases import PATTERNS, Shape, layout_for, tensors
from tests.dist.harness import Pool, run_ranks_collect

TIMEOUT_S = 2.0
CASES = (
    ("window", "contiguous"), ("documents, causal", "zigzag"), ("dilated", "zigzag"), ("causal", "zigzag"),
    ("causal", "striped"),
)  # fmt: skip
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"stage_bytes": 1 << 20},
    {"overlap": False, "prune": False, "chunk_bytes": 1},
    {"gradient_payload": "bfloat16", "stage_bytes": 1 << 20},
    {"kv_payload": list(KV_PAYLOADS)[-1]},
)


def results(mesh: RingMesh, transport: str, pattern_name: str, layout_name: str, shape: Shape, dtype: torch.dtype,
            **options: Any) -> tuple[dict[str, torch.Tensor], tuple[int, ...]]:  # fmt: skip
    """This rank's out, lse, dq, dk and dv, and what the exchange counted: batches, messages and bytes."""
    pattern = PATTERNS[pattern_name](shape.tokens)
    layout = layout_for(layout_name, pattern, tokens=shape.tokens, ring_size=mesh.ring_size,
                        multiple_of=mesh.ulysses_size)  # fmt: skip
    context = make_ring_context(pattern, layout, mesh, Options(transport=transport, kernel="cpu", **options))
    *leaves, grad = (shard_sequence(x, layout, mesh=mesh, dim=2) for x in tensors(shape, dtype))
    for _ in range(1 + (transport == "pull")):  # places are computed in the first one and used in the second
        for x in leaves:
            x.requires_grad_()
        out, lse = ring_attention_op(*leaves, context.handle)
        gradients = torch.autograd.grad((out, lse), leaves, (grad, torch.ones_like(lse)))
    result = dict(zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *gradients), strict=True))
    assert context.exchange is not None
    counted = context.exchange.counters
    passes = 1 + (transport == "pull")
    return result, tuple(x // passes for x in (counted.batches, counted.messages_sent, counted.bytes_sent))


def differences(rank: int, world_size: int, dtype: torch.dtype) -> list[Any]:
    """What differs from messages in any bit, or in what was counted."""
    mesh = RingMesh.from_world(world_size)
    shape, result = Shape(batch=2, query_heads=4, kv_heads=2, tokens=257), []
    for number, (pattern, layout) in enumerate(CASES):
        for options in (OPTIONS[0], OPTIONS[number]):
            sent, counted = results(mesh, "ring", pattern, layout, shape, dtype, **options)
            got, counted_too = results(mesh, "pull", pattern, layout, shape, dtype, **options)
            result += [(pattern, options, name) for name in sent if not torch.equal(sent[name], got[name])]
            if counted != counted_too or not counted[2]:
                result.append((pattern, options, counted, counted_too))
    return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ring_size", [2, 4])
@pytest.mark.day("4-torch.float32")
def test_every_bit_is_that_of_messages(rank_pool: Pool, ring_size: int, dtype: torch.dtype) -> None:
    assert rank_pool(ring_size).run(differences, dtype) == [[]] * ring_size


def of_two_rings(rank: int, world_size: int) -> bool:
    """Whether pulls inside two rings with Ulysses ranks between them give the bits of messages."""
    mesh, shape = RingMesh.from_world(2, 2), Shape(batch=1, query_heads=4, kv_heads=2, tokens=96)
    pattern = Causal()
    layout = make_layout("zigzag", tokens=96, ring_size=2, pattern=pattern, multiple_of=2)
    q, k, v, _ = (x[:, :, rank * 24 : rank * 24 + 24].contiguous() for x in tensors(shape, torch.float32))
    inputs: dict[str, Any] = {"pattern": pattern, "layout": layout, "mesh": mesh}
    outs = [calls.attend(q, k, v, transport=transport, **inputs) for transport in ("ring", "pull")]
    return torch.equal(*outs)


def test_beside_ulysses_ranks(rank_pool: Pool) -> None:
    assert rank_pool(4).run(of_two_rings) == [True] * 4


def memories(rank: int, world_size: int, tokens: int) -> tuple[int, int]:
    """Bytes that messages and pulls keep for buffers, after a forward and a backward pass."""
    mesh, shape = RingMesh.from_world(world_size), Shape(batch=1, query_heads=4, kv_heads=4, tokens=tokens)
    for transport in ("ring", "pull"):
        results(mesh, transport, "causal", "zigzag", shape, torch.bfloat16)
    (shared,) = mesh.owners[SharedBuffersByDevice].values()
    return mesh.owners[Buffers]._most_bytes, shared.held_bytes


@pytest.mark.parametrize(("tokens", "most"), [(512, 1.05), (509, 1.1)])
@pytest.mark.day("509-1.1")
def test_memory_is_that_of_messages(rank_pool: Pool, tokens: int, most: float) -> None:
    result = rank_pool(4).run(memories, tokens)
    used, shared = max(pool for pool, _ in result), {held for _, held in result}
    assert len(shared) == 1 and used <= shared.pop() <= most * used


def small(mesh: RingMesh, transport: str = "pull", passes: int = 1) -> torch.Tensor:
    """The output of a small pass, after its backward pass."""
    q, k, v = (x[:, :, :16].clone().requires_grad_() for x in tensors(Shape(tokens=16), torch.float32)[:3])
    for _ in range(passes):
        out = calls.attend(q, k, v, pattern=Causal(), layout="zigzag", mesh=mesh, transport=transport,
                             hop_timeout_seconds=TIMEOUT_S)  # fmt: skip
        out.sum().backward()
    return out.detach()


# What one rank of four cannot do, and what every rank must say.
REFUSALS: dict[str, tuple[Any, str, Any, tuple[str, ...]]] = {
    "other node": (shared_memory, "_node", lambda: ["b", "b"], ("a ring on one node", "ring rank 0 and ring rank 2 on", "and b")),
    "no memfd": (shared_memory, "_why_not", lambda device: "its system has no memfd", ("got ring rank 2: its system has no",)),
    "no memory": (HostShared, "_map", mock.Mock(side_effect=OSError("no room")), ("got ring rank 2: no room",)),
    "closed door": (HostShared, "open", mock.Mock(side_effect=PermissionError("not you")),
                    ("got ring rank 2, which cannot open the memory of its ring: not you",)),
}  # fmt: skip


def refused(rank: int, world_size: int, kind: str) -> tuple[str, str, float, bool]:
    """The error of a pass, the seconds that it took, and whether messages and pulls go on after it."""
    mesh, (owner, name, instead, _) = RingMesh.from_world(world_size), REFUSALS[kind]
    want = small(mesh, "ring")
    with mock.patch.object(owner, name, instead if rank == 2 else getattr(owner, name)):
        began = time.monotonic()
        try:
            small(mesh)
        except RingError as error:
            text, seconds = f"{type(error).__name__}: {error}", time.monotonic() - began
    return text, "ring", seconds, torch.equal(small(mesh, "ring"), want) and torch.equal(small(mesh), want)


@pytest.mark.parametrize("kind", REFUSALS)
def test_ranks_that_share_no_memory_are_refused_on_every_rank(rank_pool: Pool, kind: str) -> None:
    for text, usual, seconds, goes_on in rank_pool(4).run(refused, kind):
        assert text.startswith("RingConfigError: transport: expected "), text
        assert all(words in text for words in (*REFUSALS[kind][3], f'use "transport": "{usual}"')), text
        assert seconds < 1.0 and goes_on


def lose_a_signal(shared: HostShared, kind: int, peer: int, number: list[int]) -> None:
    """Signal as usual, but let the fourth one be lost."""
    number[0] += 1
    if number[0] == 4:
        shared._put[kind, peer] += 1
    else:
        real_signal(shared, kind, peer)


def wait_for_nobody(shared: HostShared, receivers: Any, pulls: Any) -> Any:
    """Begin a batch, and do not wait until the others have taken what this rank sends."""
    return real_begin(shared, receivers, pulls)[: len(pulls)]


def lie_elsewhere(schedule: Any, kind_at: Any) -> Any:
    """Places of which one is not where the others look."""
    places = real_places(schedule, kind_at)
    return places._replace(messages={key: place + 64 for key, place in places.messages.items()})


real_signal, real_begin, real_places = HostShared._signal, HostShared.begin, pull.place_buffers
FAULTS: dict[str, tuple[Any, str, Any, str]] = {
    "lost": (HostShared, "_signal", lambda self, kind, peer, n=[0]: lose_a_signal(self, kind, peer, n), "RingPeerError"),
    "too early": (HostShared, "begin", wait_for_nobody, "RingBufferError"),
    "elsewhere": (pull, "place_buffers", lie_elsewhere, "RingMismatchError"),
}  # fmt: skip


def faulty(rank: int, world_size: int, kind: str) -> tuple[str, str, Any, float]:
    """What a rank says where rank 1 has a fault, and when."""
    mesh, (owner, name, instead, _) = RingMesh.from_world(world_size), FAULTS[kind]
    began = time.monotonic()
    with mock.patch.object(owner, name, instead if rank == 1 else getattr(owner, name)):
        try:
            small(mesh, passes=3)
        except RingError as error:
            return type(error).__name__, str(error), getattr(error, "peer", None), time.monotonic() - began
    return "", "", None, 0.0


@pytest.mark.parametrize("kind", FAULTS)
def test_a_seeded_fault_is_found_within_the_deadline(kind: str) -> None:
    outcomes = run_ranks_collect(faulty, 3, kind)
    result = [outcome.value for outcome in outcomes]
    for rank, (error, text, peer, seconds) in enumerate(result):
        assert error == (FAULTS[kind][3] if rank == 1 else "RingPeerError"), result
        assert seconds < 3 * TIMEOUT_S, result
        if rank != 1 and kind != "lost":  # who has lost a signal nobody can tell
            assert peer == 1, (text, result)


def a_number_is_missing(rank: int, world_size: int) -> str:
    """What a signal with a number that was not due brings about."""
    shared = HostShared(64, torch.device("cpu"), [1])
    for number in (1, 3):
        os.write(shared._for[1], shared_memory._SIGNAL.pack(READY, number))
    shared._hear(READY, 1)
    try:
        shared._hear(READY, 1)
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_signal_that_was_not_due_is_refused(rank_pool: Pool) -> None:
    assert rank_pool(1).run(a_number_is_missing) == ["expected signal 2 of kind 0 from it, got 3"]


def opened() -> tuple[int, list[str]]:
    """The number of open files of this process, and the memory that it shares, by its name."""
    with open("/proc/self/maps") as file:
        shared = [
            line.split(maxsplit=5)[-1].strip() for line in file if "ds_ring" in line and "memfd" in line
        ]
    return len(os.listdir("/proc/self/fd")), shared


def closed(rank: int, world_size: int) -> tuple[list[str], list[str], int]:
    """The names of shared memory during a mesh's life and after it, and how many files stay open."""
    mesh = RingMesh.from_world(world_size)
    small(mesh, "ring")
    before, _ = opened()
    small(mesh)
    # passes that need more replace the memory, also where another context has used it
    results(
        mesh, "pull", "causal", "zigzag", Shape(batch=1, query_heads=2, kv_heads=2, tokens=64), torch.float32
    )
    small(mesh)
    _, during = opened()
    mesh.close()
    gc.collect()
    count, after = opened()
    return during, after, count - before


def test_nothing_has_a_name_and_closing_frees_it(rank_pool: Pool) -> None:
    for during, after, files in rank_pool(2).run(closed):
        # "(deleted)": no file system has it, so it goes with the last process, however that one ends.
        assert len(during) == 2 and set(during) == {"/memfd:ds_ring (deleted)"}
        assert not after and files <= 0


def killed(rank: int, world_size: int, folder: str) -> tuple[str, Any, float]:
    """What the others say when rank 1 is killed with memory that others have opened."""
    mesh = RingMesh.from_world(world_size)
    small(mesh)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    try:
        small(mesh, passes=2)
    except RingError as error:
        return type(error).__name__, getattr(error, "peer", None), time.monotonic() - began
    return "", None, 0.0


def test_a_killed_rank_is_named_and_leaves_nothing(tmp_path: Any) -> None:
    before = set(os.listdir("/dev/shm"))
    outcomes = run_ranks_collect(killed, 3, str(tmp_path))
    for outcome in (outcomes[0], outcomes[2]):
        error, peer, seconds = outcome.value
        assert (error, peer) == ("RingPeerError", 1) and seconds < TIMEOUT_S
    left = set(os.listdir("/dev/shm")) - before
    assert not [name for name in left if "ds_ring" in name or "torch" in name]
