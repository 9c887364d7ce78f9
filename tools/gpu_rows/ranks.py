"""Rings of several processes on one GPU: NCCL, a rank that dies, DeepSpeed."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from benchmarks.gpu_rates import seconds
from benchmarks.measuring import ResultRow
from common import in_turns, llama, make_engine, make_zero_section

from ds_ring import Causal, RingMesh, make_layout, shard_sequence
from ds_ring.errors import RingError
from ds_ring.ops.context import make_ring_context
from ds_ring.ops.options import Options
from ds_ring.ops.ring_op import ring_attention_op
from ds_ring.transports.devices import select_gpu
from ds_ring_launcher.check.model_check import CheckRequest, check_forms
from ds_ring_launcher.run.local_ranks import RanksError, run_ranks

from .kernels import (
    compute_errors,
    exact_tokens,
    get_limit,
    get_shape,
    is_cuda,
    judged,
    nccl_version,
    operands,
    reference,
)

NCCL = (2, 30)  # the first version with several ranks on a GPU
DEADLINE_S = 55.0
CULPRIT, HEARTBEAT_S = 1, 2.0
MODEL: dict[str, Any] = {
    "vocab": 512,
    "hidden": 256,
    "intermediate": 512,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
}


class OnNccl(NamedTuple):
    """Name the device of ranks whose group is NCCL's on CUDA, gloo's on the CPU."""

    device: str


def _in_ring(job: OnNccl) -> dict[str, Any]:
    """Compute causal attention in a ring of all ranks; return errors, and the time of ten passes."""
    device = job.device
    if is_cuda(device):
        torch.cuda.set_device(select_gpu(dist.get_rank(), torch.cuda.device_count()))
    mesh = RingMesh.from_world(dist.get_world_size())
    layout = make_layout("zigzag", tokens=exact_tokens(device), ring_size=mesh.ring_size, pattern=Causal())
    *leaves, grad = (shard_sequence(x, layout, mesh=mesh, dim=2) for x in operands(device))
    for x in leaves:
        x.requires_grad_()
    context = make_ring_context(Causal(), layout, mesh, Options())

    def passes() -> tuple[torch.Tensor, ...]:
        out, lse = ring_attention_op(*leaves, context.handle)
        return out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, grad)

    order = torch.from_numpy(layout.positions(mesh.ring_rank)).to(grad.device)
    want = reference(device, "causal")
    want = want._replace(**{name: x.index_select(2, order) for name, x in want._asdict().items()})
    errors = compute_errors(dict(zip(("out", "lse", "dq", "dk", "dv"), passes(), strict=True)), want)
    taken = in_turns({"pass": partial(seconds, passes, device)}, 10, 2)["pass"]
    mesh.synchronize()
    mesh.close()
    return {"errors": errors, "pass_ms": round(1e3 * sorted(taken)[5], 3)}


def _too_old(device: str) -> str:
    """Return why NCCL cannot have several ranks on a GPU, or ""."""
    if not is_cuda(device):
        return ""
    version = nccl_version()
    return "" if version >= NCCL else f"NCCL {'.'.join(map(str, version))}; 2.30 or newer is needed"


def ring(device: str, ranks: int) -> Iterator[ResultRow]:
    """Yield errors and time of the production ring."""
    if why := _too_old(device):
        yield ResultRow({"ranks": ranks}, {"not_shown": why})
        return
    job = (OnNccl(device),)
    results = run_ranks(_in_ring, ranks, job, threads=1, deadline_s=DEADLINE_S, imported=True)
    worst = {name: max(result["errors"][name] for result in results) for name in results[0]["errors"]}
    facts = {"pass_ms": max(result["pass_ms"] for result in results)}
    yield judged({"ranks": ranks}, worst, get_limit(get_shape(device).dtype), facts)


def _dies(job: OnNccl, folder: str) -> None:
    """Pass again and again, until one rank kills itself; the others write what they are told, and when."""
    mesh = RingMesh.from_world(dist.get_world_size(), heartbeat_timeout_s=HEARTBEAT_S)
    *leaves, _ = (x[:, :, :64].detach().requires_grad_() for x in operands(job.device))
    context = make_ring_context(Causal(), "zigzag", mesh, Options())
    begin = time.monotonic()
    try:
        for number in range(10_000):
            if number == 5 and mesh.ring_rank == CULPRIT:
                os.kill(os.getpid(), signal.SIGKILL)
            begin = time.monotonic()
            ring_attention_op(*leaves, context.handle)[0].sum().backward()
            mesh.synchronize()
    except RingError as error:
        report = {"error": str(error), "seconds": time.monotonic() - begin}
        Path(folder, f"{mesh.ring_rank}.json").write_text(json.dumps(report))


def killed(device: str, ranks: int) -> Iterator[ResultRow]:
    """Yield what the others are told of a rank that is killed, and after how long."""
    if why := _too_old(device):
        yield ResultRow({"ranks": ranks}, {"not_shown": why})
        return
    with tempfile.TemporaryDirectory() as folder:
        try:
            run_ranks(_dies, ranks, (OnNccl(device), folder), threads=1, deadline_s=DEADLINE_S, imported=True)
        except RanksError:
            pass
        told = [json.loads(path.read_text()) for path in Path(folder).iterdir()]
    named = sum(f"ring rank {CULPRIT}" in report["error"] for report in told)
    slowest = max((report["seconds"] for report in told), default=0.0)
    wrong = "" if named == ranks - 1 else f"expected {ranks - 1} ranks that name ring rank {CULPRIT}: {told}"
    wrong = wrong or ("" if slowest < 2 * HEARTBEAT_S + 1 else "expected an error in time")
    yield ResultRow({"ranks": ranks}, {"named_by": named, "slowest_s": round(slowest, 2)}, wrong)


def _train(job: OnNccl, steps: int) -> tuple[list[float], list[float]]:
    """Train a small model with ZeRO 3 on a ring of all ranks; return the losses, and those of one process."""
    alone = _alone(job, steps)
    dtype = get_shape(job.device).dtype
    model = llama(512, **MODEL, dtype=dtype).to(job.device)
    keys: dict[str, Any] = {"gradient_clipping": 0.0, "bf16": {"enabled": dtype == torch.bfloat16}}
    engine = make_engine(model, dist.get_world_size(), {}, make_zero_section(3, 100_000), sgd=0.1, **keys)
    losses = []
    for _ in range(steps):
        loss = engine(**engine.ring.shard_batch(_batch())).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(engine.ring.mean_loss(loss)))
    return losses, alone


def _alone(job: OnNccl, steps: int) -> list[float]:
    """Train the same model in this process, by plain torch."""
    model = llama(512, **MODEL, dtype=get_shape(job.device).dtype).to(job.device)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(steps):
        loss = model(**{name: x.to(job.device) for name, x in _batch().items()}).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def _check(job: OnNccl, model_type: str) -> list[dict[str, Any]]:
    """Compare a small model on a ring of all ranks with one process on the CPU, in float32."""
    if is_cuda(job.device):
        torch.backends.cudnn.allow_tf32 = False  # of convolutions: torch rounds their operands by default
    # This kernel compiles nothing; the others have rows of their own.
    section = {"pattern": {"causal": True}, "kernel": "reference"}
    request = CheckRequest(model_type, head="causal-lm", section=section, forms=("plain", "packed"))
    return [form.as_json() for form in check_forms(request)]


def model(device: str, ranks: int, model_type: str) -> Iterator[ResultRow]:
    """Yield the largest errors of a small model's training step on a ring against one process."""
    if why := _too_old(device):
        yield ResultRow({"ranks": ranks, "model": model_type}, {"not_shown": why})
        return
    if not is_cuda(device):
        os.environ["DS_ACCELERATOR"] = "cpu"
    job = (OnNccl(device), model_type)
    for report in run_ranks(_check, ranks, job, threads=1, deadline_s=DEADLINE_S, imported=True)[0]:
        case = {"ranks": ranks, "model": model_type, "batch": report["form"]}
        results: dict[str, Any] = {kind: f"{worst['error']:.1e}" for kind, worst in report["largest"].items()}
        if report["result"] == "refused":
            results["refused"] = report["reason"][:100]
        is_right = report["result"] in ("exact", "refused")
        yield ResultRow(case, results, "" if is_right else f"{report['result']}: {report['reason'][:300]}")


def _batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(0, MODEL["vocab"], (1, 512), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def deepspeed(device: str, ranks: int) -> Iterator[ResultRow]:
    """Yield the losses of a small model under ZeRO 3 on a ring, and those of one process."""
    if why := _too_old(device):
        yield ResultRow({"ranks": ranks}, {"not_shown": why})
        return
    if not is_cuda(device):
        os.environ["DS_ACCELERATOR"] = "cpu"
    job = (OnNccl(device), 4)
    got, want = run_ranks(_train, ranks, job, threads=1, deadline_s=2 * DEADLINE_S, imported=True)[0]
    worst = max(abs(ours - exact) / exact for ours, exact in zip(got, want, strict=True))
    limit = 1e-2 if is_cuda(device) else 1e-5
    wrong = "" if worst < limit else f"expected losses within {limit:g}"
    case = {"ranks": ranks, "losses": " ".join(f"{x:.4f}" for x in got)}
    yield ResultRow(case, {"off_by": f"{worst:.1e}"}, wrong)
