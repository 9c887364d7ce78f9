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

from ds_ring import Causal, RingError, RingMesh, SlidingWindow
from ds_ring.comm.exchange import Exchange, Pending, Route
from ds_ring.comm.messages import Message
from tests import calls

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
    "oversize": lambda sends: [m._replace(tensor=torch.cat([m.tensor, m.tensor])) for m in sends],
    "wrong dtype": lambda sends: [m._replace(tensor=m.tensor.int()) for m in sends],
    "swapped order": lambda sends: [m._replace(what="V") for m in sends],  # before its K
    "non-contiguous": lambda sends: [m._replace(tensor=_strided(m.tensor)) for m in sends],
}
# How the culprit calls otherwise than the others.
IN_THE_CALL = (
    "oversize call", "wrong dtype in a call", "swapped order of calls", "different hop counts", "different config",
)  # fmt: skip
KINDS = (*IN_A_HOP, *IN_THE_MESSAGES, *IN_THE_CALL)
# Where in RingMesh.from_world the culprit acts, and what it does.
WHILE_STARTING: dict[str, tuple[str, Callable[[], object]]] = {
    "kill before it is announced": ("entry", _die),
    "kill rank 0 before it is announced": ("entry", _die),
    "kill once it is announced": ("announced", _die),
    "kill rank 0 once all are announced": ("monitor", _die),
    "kill rank 0 before it publishes the monitor": ("publish", _die),
    "kill before it connects": ("connect", _die),
    "kill in the handshake": ("handshake", _die),
    "kill once it has joined": ("joined", _die),
    "kill rank 0 once it has joined": ("joined", _die),
    "kill in the first group": ("first group", _die),
    "kill in the last group": ("last group", _die),
    "stop in the first group": ("first group", _stop),
    "exception in the first group": ("first group", _raise),
    "exit(0) in the first group": ("first group", _leave),
}
# Where in a DeepSpeed run, outside the ring, and what. All of torch's own collectives.
OUTSIDE: dict[str, tuple[str, Callable[[], object]]] = {
    "kill in step": ("step", _die),
    "stop in step": ("step", _stop),
    "exception in step": ("step", _raise),
    "exit(0) in step": ("step", _leave),
    "kill in backward's collectives": ("backward", _die),
    "stop in backward's collectives": ("backward", _stop),
    "kill in save_checkpoint": ("save", _die),
    "stop in save_checkpoint": ("save", _stop),
    "kill in the loader": ("loader", _die),
    "exception in the loader": ("loader", _raise),
    "kill in a collective of the script": ("script", _die),
    "kill while configurations are compared": ("configs", _die),
    "kill while the mesh is made": ("first group", _die),
    "stop while the mesh is made": ("first group", _stop),
}


# Where a rank is alive and late, or leaves as if all were done: every place outside of a pass. What limits
# each is a key of the JSON; "step" also holds for what the script does between two calls of the engine.
LATE_PLACES = {
    "before the group is made": "start",
    "after the group is made": "start",
    "while configurations are compared": "hop",
    "in the first group of the mesh": "start",
    "while the engine is made": "start",
    "before the first batch": "step",
    "in the data set": "step",
    "between forward and backward": "hop",
    "in backward's collectives": "hop",
    "before the step": "step",
    "inside the step": "hop",
    "before the mean loss": "step",
    "in a collective of the script": "step",
    "in an evaluation on one rank": "step",
    "before a checkpoint": "step",
    "in save_checkpoint": "checkpoint",
}
SLEEP_S = 40.0  # longer than every limit, and than what follows it
LATE: dict[str, tuple[str, Callable[[], object]]] = {
    f"{what} {place}": (place, act)
    for what, act in (("sleep", lambda: time.sleep(SLEEP_S)), ("exit(0)", _leave))
    for place in LATE_PLACES
}
LIMITS_S = {"step": 5.0, "checkpoint": 6.0, "start": 10.0}  # of a campaign; "hop" is the job's


def _strided(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([x, x], dim=-1)[..., 0]


def culprit_of(kind: str) -> int:
    """The rank that does it."""
    return 0 if kind.startswith("kill rank 0") else CULPRIT


def preload(modes: list[str]) -> None:
    """Imports that every rank shares."""
    if {"deepspeed", "outside", "late"} & set(modes):
        import deepspeed
        import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401  seconds, else within initialize
        import transformers.models.llama.modeling_llama  # noqa: F401

        import ds_ring.models.attention
        import ds_ring.start  # noqa: F401


def rank_main(rank: int, job: dict[str, Any]) -> None:
    """One rank of a campaign: ends with the error that it saw, after writing it down."""
    torch.set_num_threads(1)
    folder, kind = Path(job["folder"]), job["kind"]
    armed = rank == culprit_of(kind)
    if job["mode"] == "late":  # ds_ring.initialize makes the group
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(job["port"])}
        if armed and LATE[kind][0] == "before the group is made":
            happens_now(folder)
            LATE[kind][1]()
    else:
        store = f"file://{folder}/store"
        dist.init_process_group("gloo", store, rank=rank, world_size=job["world_size"])
    if armed and kind in WHILE_STARTING | OUTSIDE | LATE:
        arm_the_start(*(WHILE_STARTING | OUTSIDE | LATE)[kind], folder)
    work = {"deepspeed": train, "attention": attend}.get(job["mode"], train_and_save)
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
    start, count = Exchange.start, iter(range(1, 1 << 30))

    def faulty(self: Exchange, route: Route, sent: Any, received: Any, hop: int | None = None) -> Pending:
        if not sent or not route.sizes.is_one or next(count) != batch_number:  # no header's
            return start(self, route, sent, received, hop)
        happens_now(folder)
        if before is not None:
            before()
        if after is not None:
            threading.Timer(MID_TRANSFER_S, after).start()
        if kind not in IN_THE_MESSAGES:
            return start(self, route, sent, received, hop)
        sides = ((sent, route.sends), (received, route.receives))
        sends, receives = (
            [Message(x, peer, "K/V", x.shape[0], x.dtype) for x, peer in zip(*side, strict=True)]
            for side in sides
        )
        return self.post(IN_THE_MESSAGES[kind](sends), receives, hop)

    Exchange.start = faulty  # type: ignore[method-assign]


def before_call(owner: Any, name: str, number: int, act: Callable[[], object]) -> None:
    """Let `act` happen at the n-th call of a function, before anything else there."""
    real, count = getattr(owner, name), iter(range(1, 1 << 30))

    def call(*args: Any, **kwargs: Any) -> Any:
        if next(count) == number:
            act()
        return real(*args, **kwargs)

    setattr(owner, name, call)


def arm_the_start(where: str, act: Callable[[], object], folder: Path) -> None:
    """Let this process act at one point of what comes before the first pass."""
    from ds_ring.data import config_agreement
    from ds_ring.health import joining
    from ds_ring.health.failure_detector import handshake
    from ds_ring.health.joining import Arrival

    def fault() -> None:
        happens_now(folder)
        act()

    places: dict[str, tuple[Any, str, int]] = {
        "entry": (joining, "join", 1),
        "announced": (Arrival, "wait_for", 1),
        "monitor": (joining, "start_monitor", 1),
        "publish": (joining, "MonitorAddress", 1),
        "connect": (joining, "_connect", 1),
        "handshake": (handshake.RankHandshake, "check_welcome", 1),
        "joined": (joining.FirstCollective, "end", 1),
        "first group": (dist, "new_group", 1),
        "last group": (dist, "new_group", 2),
        "configs": (config_agreement, "_gather", 1),
        "after the group is made": (joining, "join", 1),
        "while configurations are compared": (config_agreement, "_gather", 1),
        "in the first group of the mesh": (dist, "new_group", 1),
        "while the engine is made": (torch.nn.Module, "to", 1),  # by DeepSpeed, of the model
    }
    if where in places:
        before_call(*places[where], fault)


def attend(rank: int, job: dict[str, Any], fault: str | None) -> None:
    """Forward and backward passes over the ring; the fault is in one of the later ones."""
    mesh = RingMesh.from_world(job["world_size"], heartbeat_timeout_s=job["heartbeat_timeout_s"])
    large = "64 MB" in job["kind"]
    if fault is not None and fault not in IN_THE_CALL:
        arm(fault, Path(job["folder"]), job["batch_number"])
    for step in range(STEPS):
        q, k, v = (torch.randn(1, 1, LARGE if large else SMALL, 64, requires_grad=True) for _ in range(3))
        options: dict[str, Any] = {"pattern": SlidingWindow(16) if large else Causal(), "prune": not large}
        options |= {"layout": "contiguous", "hop_timeout_seconds": job["hop_timeout_s"], "mesh": mesh}
        if fault in IN_THE_CALL and step == STEPS // 2:
            happens_now(Path(job["folder"]))
            q, k, v, options = otherwise(fault, q, k, v, options)
        outs = [calls.attend(q, k, v, **options), calls.attend(q, k, v, **(options | {"scale": 0.5}))]
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
    from ds_ring.models.attention import attention as registered
    from tests.dist.deepspeed_ranks import json_config, start_engine, take_step

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
    engine = start_engine(_model(), json_config(job["world_size"], 1, 1, ring_attention=section), 0.1)
    tokens = (LARGE if large else SMALL) * job["world_size"]
    for step in range(STEPS):
        ids = torch.randint(1, 61, (1, tokens), generator=torch.Generator().manual_seed(step))
        if step == 1 and fault is not None and fault not in IN_THE_CALL:
            arm(fault, folder, job["batch_number"])
        if step == 1 and fault in IN_THE_CALL:
            happens_now(folder)
            ids = _misbehave(fault, ids, registered)
        take_step(engine, {"input_ids": ids, "labels": ids.clone()})


def train_and_save(rank: int, job: dict[str, Any], fault: str | None) -> None:
    """Training with a loader, collectives of the script and checkpoints, at any ZeRO stage; small sequences."""
    from tests.dist.deepspeed_ranks import json_config, start_engine

    folder = Path(job["folder"])
    where, act = (OUTSIDE | LATE).get(fault or "", ("", lambda: None))
    late = job["mode"] == "late"

    def fails(place: str, step: int = 2) -> None:
        if step == 2 and where == (_LATE_NAMES.get(place, place) if late else place):
            happens_now(folder)
            act()

    class Samples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
        def __len__(self) -> int:
            return STEPS

        def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
            fails("loader", number)
            ids = torch.randint(1, 61, (SMALL,), generator=torch.Generator().manual_seed(number))
            return {"input_ids": ids, "labels": ids.clone()}

    section = {"heartbeat_timeout_seconds": job["heartbeat_timeout_s"]}
    section |= {"hop_timeout_seconds": job["hop_timeout_s"]}
    if late:
        section |= {f"{name}_timeout_seconds": seconds for name, seconds in LIMITS_S.items()}
    config = json_config(job["world_size"], 1, job["stage"], ring_attention=section)
    engine = start_engine(_model(), config, 0.1)
    take_step, steps = engine._take_model_step, iter(range(STEPS))

    def take_step_or_fail(*args: Any, **kwargs: Any) -> Any:
        fails("step", next(steps))
        return take_step(*args, **kwargs)

    engine._take_model_step = take_step_or_fail
    fails("before the first batch")
    for step, batch in enumerate(engine.ring.loader(Samples(), 1)):
        loss = engine(**batch).loss
        fails("between forward and backward", step)
        if (
            where in ("backward", _LATE_NAMES["backward"]) and step == 2
        ):  # this one gets its gradient last, behind the ring's
            engine.module.get_input_embeddings().weight.register_hook(lambda _: fails("backward"))
        engine.backward(loss)
        fails("before the step", step)
        engine.step()
        fails("script", step)
        dist.all_reduce(torch.ones(1000))
        if where == "in an evaluation on one rank" and step == 2:
            happens_now(folder)
            with engine.ring.off(), torch.no_grad():
                ends, ids = time.monotonic() + SLEEP_S, torch.ones(1, SMALL, dtype=torch.long)
                while time.monotonic() < ends:
                    engine(input_ids=ids)
                    if act is _leave:
                        act()
        fails("before a checkpoint", step)
        if step == 2:
            if where in ("save", _LATE_NAMES["save"]):
                before_call(type(engine), "save_checkpoint", 1, lambda: fails("save"))
            engine.save_checkpoint(str(folder / "checkpoints"))
        fails("before the mean loss", step)
        engine.ring.mean_loss(loss)


_LATE_NAMES = {
    "loader": "in the data set", "step": "inside the step", "backward": "in backward's collectives",
    "script": "in a collective of the script", "save": "in save_checkpoint",
}  # fmt: skip


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
