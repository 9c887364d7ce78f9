"""The doctor's proof that a ring is one: on real rings, and on what only looks like one."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ds_ring import Causal, RingMesh, simulate
from ds_ring.kernels.interface import Operands
from ds_ring.ops import ring_op as autograd
from ds_ring.ops.context import RingContext
from ds_ring.ops.options import Options
from ds_ring.ops.prepare import make_planner
from ds_ring.ring.ring_pass import RingPass
from ds_ring.simulation.rank import GlobalSizes
from ds_ring.simulation.simulate import SimulationOptions
from ds_ring.transports.all_gather.gather_pass import GatherPass
from ds_ring_launcher.doctor import self_test
from ds_ring_launcher.doctor.findings import OK, WRONG, judge_ring
from ds_ring_launcher.doctor.self_test import AttentionJob, measure_rank
from tests.dist.harness import RankPool

Pool = Callable[[int], RankPool]
JOB = AttentionJob(GlobalSizes(1, 4, 2, 2001, 32, torch.float32), Causal())


def by_function(parts: list[Tensor], x: Tensor) -> None:
    dist.all_gather(parts, x)


def backend(x: Tensor) -> Any:
    return dist.group.WORLD._get_backend(x.device)


def by_backend_in_a_thread(parts: list[Tensor], x: Tensor) -> None:
    way = backend(x)
    thread = threading.Thread(target=lambda: way.allgather([parts], [x]).wait())
    thread.start()
    thread.join()


def by_sends(parts: list[Tensor], x: Tensor) -> None:
    """An all-gather of messages to one rank each: no collective, and no message larger than a shard."""
    way, rank = backend(x), dist.get_rank()
    others = [other for other in range(len(parts)) if other != rank]
    works = [way.recv([parts[other]], other, 7) for other in others]
    works += [way.send([x], other, 7) for other in others]
    for work in works:
        work.wait()
    parts[rank].copy_(x)


def in_one_message(parts: list[Tensor], x: Tensor) -> None:
    """Shards come by way of one rank, which sends them all in one message."""
    way, rank, size = backend(x), dist.get_rank(), len(parts)
    everything = torch.stack([x] * size)
    for other in range(1, size):
        if rank in (0, other):
            works = [way.recv([everything[other] if rank == 0 else everything[0]], other * (rank == 0), 7)]
            works += [way.send([x], other * (rank == 0), 7)]
            for work in works:
                work.wait()
    for other in range(1, size):
        if rank == 0:
            way.send([everything], other, 8).wait()
        elif rank == other:
            way.recv([everything], 0, 8).wait()
    for part, there in zip(parts, everything, strict=True):
        part.copy_(there)


def as_integers(parts: list[Tensor], x: Tensor) -> None:
    """What travels says that it is a header."""
    by_sends([part.view(torch.int32) for part in parts], x.view(torch.int32))


def not_at_all(parts: list[Tensor], x: Tensor) -> None:
    """Nothing travels: a count of 0 must never pass for a ring."""


@contextmanager
def disguised(gather: Callable[[list[Tensor], Tensor], None] | None) -> Iterator[None]:
    """Put the all-gather, done in some way, in the place of the ring pass; the options still say "ring"."""
    real = autograd.prepare_pass

    def prepare_pass(context: RingContext, call: Any, operands: Operands, *more: Any) -> Any:
        made = real(context, call, operands, *more)
        assert isinstance(made, RingPass) and made.exchange is not None, "the options say ring"
        plan = make_planner(context, operands)(
            context.pattern, context.layout_for(operands.q.shape[2], "cpu")
        )
        exchange = SimpleNamespace(all_gather=gathered, reduce_scatter=reduced, mesh=context.mesh)
        return GatherPass(plan, context.mesh.ring_rank, made.kernel, exchange, made.scale)  # type: ignore[arg-type]

    def gathered(x: Tensor, group: Any, size: int) -> list[Tensor]:
        parts = [torch.zeros_like(x) for _ in range(size)]
        gather(parts, x.contiguous())  # type: ignore[misc]
        return parts

    def reduced(parts: list[Tensor], group: Any) -> Tensor:
        everybody = [gathered(part, group, len(parts)) for part in parts]
        return torch.stack(everybody[dist.get_rank()]).sum(0)

    if gather is not None:
        autograd.prepare_pass = prepare_pass
    try:
        yield
    finally:
        autograd.prepare_pass = real


def told(rank: int, world_size: int, gather: Any, options: Options, whole: bool) -> list[dict[str, Any]]:
    """What the ranks of a ring would tell the doctor; without memory and links, which take longer."""
    module: Any = self_test
    real = module._memory, module._link
    module.MEMORY_TOKENS = 4096
    if not whole:
        module._memory, module._link = lambda *_: (1.0, 1.0 * world_size), lambda _: None
    try:
        with disguised(gather):
            answers = self_test.self_test(RingMesh.from_world(world_size), options)
    finally:
        module._memory, module._link = real
    told = [{**one._asdict(), "link": one.link and one.link._asdict()} for one in answers]
    found: list[dict[str, Any]] = json.loads(json.dumps(told))
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_a_real_ring_is_seen_to_send_what_its_schedule_says(rank_pool: Pool, size: int) -> None:
    ranks = rank_pool(size).run(told, None, Options(), whole=size == 2)[0]
    findings = {one.what: one for one in judge_ring(ranks)}
    assert findings["ring"].state == findings["exact"].state == findings["memory"].state == OK, findings
    for one in ranks:
        traffic = one["traffic"]
        assert traffic["sends"] > 0 and traffic["others"] == {}
        assert 0 < traffic["integers"] < one["shard"], "headers are sent, too"
        assert traffic["sent"] == one["planned_sent"] and traffic["received"] == one["planned_received"]
    # K and V, forward and backward, go to every rank that reads them: P (P - 1) / 2 half shards and more
    assert sum(one["planned_sent"] for one in ranks) >= 2 * size * (size - 1) // 2 * ranks[0]["shard"]


def measured(rank: int, world_size: int) -> int:
    mesh = RingMesh.from_world(world_size)
    return measure_rank(mesh, JOB).peak_bytes


def test_virtual_ranks_take_what_real_ones_do(rank_pool: Pool) -> None:
    """(The oracle of `ds_ring.simulate`'s memory.)"""
    result = simulate(
        JOB.source, pattern=JOB.pattern, layout=JOB.layout(2), grad_out=True, options=SimulationOptions()
    )
    for rank, peak in enumerate(rank_pool(2).run(measured)):
        assert result.memory[rank].peak_bytes == pytest.approx(peak, rel=0.03)


@pytest.mark.parametrize(
    ("gather", "says"),
    [
        (by_function, "called 12 all_gather"),
        (by_backend_in_a_thread, "called 12 all_gather"),
        (by_sends, "its plan says [0-9]+"),
        (in_one_message, "one message had 2.0 shards"),
        (as_integers, "sent 0 numbers of K, V and gradients, its plan says [0-9]+"),
        (not_at_all, "sent 0 numbers of K, V and gradients, its plan says [0-9]+"),
        (None, "called .*all_gather"),
    ],
)
def test_what_is_no_ring_is_wrong(rank_pool: Pool, gather: Any, says: str) -> None:
    options = Options() if gather else Options(transport="all_gather")
    ranks = rank_pool(4).run(told, gather, options, whole=False)[0]
    findings = {one.what: one for one in judge_ring(ranks)}
    assert findings["ring"].state == WRONG, findings
    assert re.search(says, findings["ring"].says), findings
    if gather not in (not_at_all, None):
        assert findings["exact"].state == OK, "the disguise must compute what a ring computes"


def test_what_nccl_tells_the_profiler_is_counted() -> None:
    """The profiler's events of NCCL, as torch's source writes them; none was recorded on a GPU so far."""

    def event(name: str, **told: str) -> SimpleNamespace:
        return SimpleNamespace(name=lambda: name, extra_meta=lambda: told)

    def operation(what: str, numbers: int, dtype: str = "BFloat16") -> SimpleNamespace:
        told = {"Collective name": what, "dtype": dtype, "In msg nelems": "8", "Out msg nelems": str(numbers)}
        return event("record_param_comms", **told)

    started_as_one = [operation("recv", 32), operation("send", 32), event("nccl:coalesced")]
    alone = [operation("send", 16), event("nccl:send 0->1"), operation("send", 8, "Long"), event("aten::add")]
    alone.append(operation("recvAnySource", 12))
    found = self_test._traffic([*started_as_one, *alone, operation("_allgather_base", 64)])
    assert found == self_test.Traffic(2, 48, 44, 32, {"_allgather_base": 1}, 8)
