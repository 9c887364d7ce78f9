"""What goes wrong in a rank on purpose, and what the ranks of a fault campaign do. Run by `zygote.py`.

Owns the faults. The culprit acts in the middle of training or of attention; every other rank records which
error it got and when, and ends with that error as a training script would.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ds_ring import Causal, RingError, RingMesh, SlidingWindow, ring_attention
from ds_ring.runtime.exchange import Exchange, Message, Pending

CULPRIT = 2
STEPS = 6  # passes, or training steps; the fault comes in the second half
MID_TRANSFER_S = 0.004  # 64 MB take some 20 ms on loopback
SMALL, LARGE = 64, 131072  # local tokens: K and V of 16 KiB, and of 32 MiB each


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _raise() -> None:
    raise ZeroDivisionError("on purpose")


def _leave() -> None:
    raise SystemExit(0)


# What the culprit does in a hop: (before the messages are posted, some milliseconds after).
IN_A_HOP: dict[str, tuple[Callable[[], object] | None, Callable[[], object] | None]] = {
    "kill in a small hop": (_die, None),
    "kill in mid 64 MB": (None, _die),
    "kill rank 0": (_die, None),
    "stop in a small hop": (_stop, None),
    "stop in mid 64 MB": (None, _stop),
    "exception": (_raise, None),
    "exit(0)": (_leave, None),
    "abort": (lambda: ctypes.CDLL(None).abort(), None),
    "sleep longer than the deadline": (lambda: time.sleep(12.0), None),
}
# How the messages of one hop of the culprit are not what its plan says.
IN_THE_MESSAGES: dict[str, Callable[[list[Message]], list[Message]]] = {
    "oversize": lambda sends: [m._replace(tensor=torch.cat([m.tensor, m.tensor], dim=2)) for m in sends],
    "wrong dtype": lambda sends: [m._replace(tensor=m.tensor.int()) for m in sends],
    "swapped order": lambda sends: [sends[1], sends[0], *sends[2:]],
    "non-contiguous": lambda sends: [m._replace(tensor=_strided(m.tensor)) for m in sends],
}
# How the culprit calls otherwise than the others.
IN_THE_CALL = (
    "oversize call", "wrong dtype in a call", "swapped order of calls", "different hop counts", "different config",
)  # fmt: skip
KINDS = (*IN_A_HOP, *IN_THE_MESSAGES, *IN_THE_CALL)


def _strided(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([x, x], dim=-1)[..., 0]


def culprit_of(kind: str) -> int:
    """The rank that does it."""
    return 0 if kind == "kill rank 0" else CULPRIT


def preload(modes: list[str]) -> None:
    """Imports that every rank shares."""
    if "deepspeed" in modes:
        import deepspeed  # noqa: F401
        import transformers.models.llama.modeling_llama  # noqa: F401

        import ds_ring.integrations.deepspeed
        import ds_ring.integrations.transformers  # noqa: F401


def rank_main(rank: int, job: dict[str, Any]) -> None:
    """One rank of a campaign: ends with the error that it saw, after writing it down."""
    torch.set_num_threads(1)
    folder, kind = Path(job["folder"]), job["kind"]
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", store, rank=rank, world_size=job["world_size"])
    armed = rank == culprit_of(kind)
    work = train if job["mode"] == "deepspeed" else attend
    try:
        work(rank, job, kind if armed else None)
    except RingError as error:
        record(folder, rank, error)
        raise
    record(folder, rank, None)


def record(folder: Path, rank: int, error: RingError | None) -> None:
    """Which error, and when."""
    seen = {"at": time.time(), "type": type(error).__name__, "text": str(error)}
    seen["peer"] = getattr(error, "peer", None)
    Path(folder, f"rank{rank}.json").write_text(json.dumps(seen))


def happens_now(folder: Path) -> None:
    """The time of the fault, for the seconds until it is seen."""
    with open(folder / "fault", "w") as file:
        file.write(repr(time.time()))


def arm(kind: str, folder: Path, batch_number: int) -> None:
    """Let this process do its fault at its n-th batch with something to send, from now on."""
    before, after = IN_A_HOP.get(kind, (None, None))
    change = IN_THE_MESSAGES.get(kind, lambda sends: sends)
    post, count = Exchange.post, iter(range(1, 1 << 30))

    def faulty(self: Exchange, sends: Any, receives: Any, hop: int | None = None) -> Pending:
        if not sends or next(count) != batch_number:
            return post(self, sends, receives, hop)
        happens_now(folder)
        if before is not None:
            before()
        if after is not None:
            threading.Timer(MID_TRANSFER_S, after).start()
        return post(self, change(sends), receives, hop)

    Exchange.post = faulty  # type: ignore[method-assign]


def attend(rank: int, job: dict[str, Any], fault: str | None) -> None:
    """Forward and backward passes over the ring; the fault is in one of the later ones."""
    mesh = RingMesh.from_world(job["world_size"], heartbeat_timeout_s=job["heartbeat_timeout_s"])
    large = "64 MB" in job["kind"]
    if fault is not None and fault not in IN_THE_CALL:
        arm(fault, Path(job["folder"]), job["batch_number"])
    for step in range(STEPS):
        q, k, v = (torch.randn(1, 1, LARGE if large else SMALL, 64, requires_grad=True) for _ in range(3))
        options: dict[str, Any] = {"pattern": SlidingWindow(16) if large else Causal(), "prune": not large}
        options |= {"layout": "contiguous", "hop_timeout_s": job["hop_timeout_s"], "mesh": mesh}
        if fault in IN_THE_CALL and step == STEPS // 2:
            happens_now(Path(job["folder"]))
            q, k, v, options = otherwise(fault, q, k, v, options)
        outs = [ring_attention(q, k, v, **options), ring_attention(q, k, v, **(options | {"scale": 0.5}))]
        for out in outs if options.pop("swapped", False) else reversed(outs):
            out.sum().backward(retain_graph=True)


def otherwise(
    fault: str | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]]:
    """The arguments of a rank that calls otherwise than the others."""
    if fault == "oversize call":
        q, k, v = (torch.cat([x, x], dim=2).detach().requires_grad_() for x in (q, k, v))
    if fault == "wrong dtype in a call":
        q, k, v = (x.double().detach().requires_grad_() for x in (q, k, v))
    if fault == "swapped order of calls":
        options = options | {"scale": 0.5}
    if fault == "different hop counts":
        options = options | {"pattern": SlidingWindow(8)}
    if fault == "different config":
        options = options | {"prune": False}
    return q, k, v, options


def train(rank: int, job: dict[str, Any], fault: str | None) -> None:
    """Real training steps under DeepSpeed with ZeRO 1; the fault is in the second or a later one."""
    import ds_ring
    from ds_ring.integrations import transformers as registered
    from tests.dist.deepspeed_ranks import json_config

    folder, large = Path(job["folder"]), "64 MB" in job["kind"]
    section = {
        "heartbeat_timeout_seconds": job["heartbeat_timeout_s"],
        "hop_timeout_seconds": job["hop_timeout_s"],
        "prune": not large,
        "layout": "contiguous",
        "pattern": {"causal": True, "window": 16 if large else None},
    }
    if fault == "different config":
        happens_now(folder)
        section["prune"] = large
    model = _model()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    config = json_config(job["world_size"], 1, 1) | {"ring_attention": section}
    engine, *_ = ds_ring.initialize(model=model, optimizer=sgd, config=config)
    tokens = (LARGE if large else SMALL) * job["world_size"]
    for step in range(STEPS):
        ids = torch.randint(1, 61, (1, tokens), generator=torch.Generator().manual_seed(step))
        if step == 1 and fault is not None and fault not in IN_THE_CALL:
            arm(fault, folder, job["batch_number"])
        if step == 1 and fault in IN_THE_CALL:
            happens_now(folder)
            ids = _misbehave(fault, ids, registered)
        loss = engine(**engine.ring.shard_batch({"input_ids": ids, "labels": ids.clone()})).loss
        engine.backward(loss)
        engine.step()
        engine.ring.mean_loss(loss)


def _model() -> torch.nn.Module:
    """One key head of 64, so that 131072 tokens are 32 MiB of K; little else."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 61}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 64}
    config = LlamaConfig(**sizes, **heads)
    return AutoModelForCausalLM.from_config(config, attn_implementation="ds_ring")


def _misbehave(fault: str | None, ids: torch.Tensor, registered: Any) -> torch.Tensor:
    """One rank's part in a training step that is not the others'; its batch."""
    if fault == "oversize call":
        return torch.cat([ids, ids], dim=1)
    from transformers import AttentionInterface

    real, calls = AttentionInterface()["ds_ring"], iter(range(1 << 30))

    def otherwise_once(module: Any, q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> Any:
        if next(calls):
            return real(module, q, k, v, *args, **kwargs)
        if fault == "wrong dtype in a call":
            return real(module, q.double(), k.double(), v.double(), *args, **kwargs)
        if fault == "swapped order of calls":
            return real(module, q, k, v, *args, **(kwargs | {"scaling": 0.5}))
        return q.transpose(1, 2), None  # "different hop counts": this layer does not attend at all

    AttentionInterface.register("ds_ring", otherwise_once)
    return ids
