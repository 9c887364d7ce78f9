"""What the ranks of the checkpoint tests do: train, save, die in mid-save, load and go on.

Owns the training loop and the ways in which saving is cut short; what must hold stands in test_checkpoint.py.
Rank functions are called by the harness as fn(rank, world_size, ...).
"""

from __future__ import annotations

import io
import os
import random
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch

from tests.dist.deepspeed_ranks import VOCABULARY, Size, build_model, listen, start_deepspeed, take_step
from tests.dist.harness import Failure, catch_failure

SIZE = Size(hidden=16, layers=1, tokens=24, samples=2)


class Resumed(NamedTuple):
    """What one rank saw of a load and of the training after it.

    Attributes:
        folder: the tag that was loaded; "" for none.
        state: the client state, or None.
        losses: of the steps after the loaded one.
        logged: the messages of ds_ring's checkpoint code on this rank.
    """

    folder: str
    state: dict[str, Any] | None
    losses: list[float]
    logged: str


def start_engine(config: dict[str, Any]) -> Any:
    """A new engine over a new model; Adam, so that a wrong optimizer state shows in the losses."""
    start_deepspeed()
    import ds_ring
    import ds_ring.models.attention  # registers the attention implementation

    model = build_model(SIZE, "ds_ring")
    adam = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return ds_ring.initialize(model=model, optimizer=adam, config=config)[0]


def train_to(engine: Any, steps: int, after: Callable[[int], object] = lambda step: None) -> list[float]:
    """Train to step `steps`, each step on its own batch; the losses, exact."""
    losses = []
    for step in range(engine.global_steps + 1, steps + 1):
        losses.append(take_step(engine, _batch(step)))
        after(step)
    return losses


def _batch(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids_BT = torch.randint(1, VOCABULARY, (SIZE.samples, SIZE.tokens), generator=generator)
    return {"input_ids": ids_BT, "labels": ids_BT}


def train_and_save(
    rank: int, world_size: int, config: dict[str, Any], folder: str, steps: int, save_at: tuple[int, ...]
) -> list[float]:
    """The uninterrupted run."""
    engine = start_engine(config)

    def save(step: int) -> None:
        if step in save_at:
            assert engine.save_checkpoint(folder, client_state={"seen": step}) is True

    return train_to(engine, steps, save)


def load_and_train(
    rank: int,
    world_size: int,
    config: dict[str, Any],
    folder: str,
    steps: int,
    tag: str | None = None,
    options: dict[str, Any] | None = None,
) -> Resumed:
    """A new process's way: load, go on."""
    engine = start_engine(config)
    with listen() as lines:
        path, state = engine.load_checkpoint(folder, tag, **(options or {}))
    losses = train_to(engine, steps)
    seen = None if state is None else {"seen": state["seen"]}
    return Resumed("" if path is None else Path(path).parent.name, seen, losses, "\n".join(lines))


def load_refused(
    rank: int,
    world_size: int,
    config: dict[str, Any],
    folder: str,
    tags: list[str | None],
    options: dict[str, Any] | None = None,
) -> Failure:
    """Load `tags[rank]`, which must fail."""
    engine = start_engine(config)
    return catch_failure(lambda: engine.load_checkpoint(folder, tags[rank], **(options or {})))


class Planted:
    """Pickles to a call of a shell command that leaves the file `path`."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, (f"touch '{self.path}'",)


def save_on(
    rank: int,
    world_size: int,
    config: dict[str, Any],
    folder: str,
    tag: str,
    most_bytes: int = 0,
    background: bool = False,
    steps: int = 100,
) -> Failure:
    """Save, as if after many steps; with `most_bytes` no file of rank 1 may become longer."""
    engine, limits = start_engine(config), resource.getrlimit(resource.RLIMIT_FSIZE)
    engine.global_steps = steps
    if most_bytes and rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, limits[1]))
    try:
        return catch_failure(lambda: engine.save_checkpoint(folder, tag, background=background))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def go_back_and_save(rank: int, world_size: int, config: dict[str, Any], folder: str) -> Failure:
    """Load the newest that is whole, which is one of step 2, and save after step 3."""
    engine = start_engine(config)
    engine.load_checkpoint(folder)
    train_to(engine, 3)
    return catch_failure(lambda: engine.save_checkpoint(folder))


HELD: list[Any] = []


def hold_the_folder(rank: int, world_size: int, config: dict[str, Any], folder: str) -> tuple[int, int]:
    """Save, and keep the engine when the call has ended; the pids of this rank and of a child that it forks."""
    engine = start_engine(config)
    HELD.append(dict(vars(engine)))
    engine.save_checkpoint(folder, "first")
    child = os.fork() if len(HELD) == 1 and rank == 0 else -1
    if not child:
        time.sleep(60)
        os._exit(0)
    return os.getpid(), child


def save_with_state(rank: int, world_size: int, config: dict[str, Any], folder: str, state: str) -> Failure:
    """Save with a client state, and if that was no error, load it again."""
    states = {
        "a path": Path("data"),
        "a lambda": lambda: None,
        "random states": [np.random.get_state(), random.getstate(), torch.get_rng_state(), np.float32(1.5)],
    }
    engine = start_engine(config)

    def save_and_load() -> None:
        engine.save_checkpoint(folder, client_state={"mine": states[state]})
        loaded = start_engine(config).load_checkpoint(folder)[1]["mine"]
        assert len(loaded[0][1]) == 624 and loaded[1][0] == 3 and loaded[3] == 1.5  # those of rank 0

    return catch_failure(save_and_load)


def save_refused(
    rank: int, world_size: int, config: dict[str, Any], places: list[tuple[str, str]]
) -> Failure:
    """Save by the folder and the tag of `places[rank]`, which must fail."""
    engine = start_engine(config)
    return catch_failure(lambda: engine.save_checkpoint(*places[rank]))


class LostHop(NamedTuple):
    """What a rank saw after a hop on rank 1's device failed: refusals by name, and what changed all the same."""

    refusals: dict[str, str]
    waits: tuple[int, int, int]
    changed: list[str]
    steps: int


def lose_a_hop(rank: int, world_size: int, config: dict[str, Any], folder: str) -> LostHop:
    """Train a step and save; then a hop of rank 1 fails on a device, half a second after the backward pass."""
    from ds_ring.comm.in_flight import Pending
    from ds_ring.comm.waiting import CallSite
    from ds_ring.cuda.watchdog import WorkWatchdog

    engine = start_engine(config)
    mesh, waits = engine.ring.run_mesh, [0]
    work_watchdog = WorkWatchdog.for_mesh(mesh)
    synchronize = work_watchdog.synchronize

    def counted(*args: Any) -> None:
        waits[0] += 1
        synchronize(*args)

    work_watchdog.synchronize = counted
    seen = []
    for _ in range(2):  # micro batches; the first one only accumulates
        train_to(engine, engine.global_steps + 1)
        seen.append(waits[0])
    engine.save_checkpoint(folder)
    seen.append(waits[0])
    for _ in range(2):
        loss = engine(**engine.ring.shard_batch(_batch(9))).loss
        engine.backward(loss)
        if not engine.is_gradient_accumulation_boundary():
            engine.step()
    if rank == 1:
        fails_at = time.monotonic() + 0.5

        def fails() -> bool:
            if time.monotonic() > fails_at:
                raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
            return False

        work = SimpleNamespace(is_completed=lambda: True, wait=lambda: True)
        batch = Pending([work], [(0,)], mesh, CallSite(9, 1), 30.0, [], [], watchdog=work_watchdog)
        batch.arrived = fails
        work_watchdog.add(batch)
    else:  # whose own messages were all right: it hears of the fault
        end = time.monotonic() + 20.0
        while mesh.detector.fault is None and time.monotonic() < end:
            time.sleep(0.01)
    before = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
    calls: dict[str, Callable[[], object]] = {
        "step": engine.step,
        "save": lambda: engine.save_checkpoint(folder, "stale"),
        "background": lambda: engine.save_checkpoint(folder, "stale", background=True),
        "16 bit": lambda: engine.save_16bit_model(folder),
    }
    refusals = {name: catch_failure(call) for name, call in calls.items()}
    changed = [name for name, p in engine.module.named_parameters() if not torch.equal(before[name], p)]
    said = {name: f"{item.error}: {item.text}" for name, item in refusals.items()}
    return LostHop(said, (seen[0], seen[1], seen[2]), changed, engine.global_steps)


def die_in_mid_save(
    rank: int, world_size: int, config: dict[str, Any], folder: str, steps: int, where: str
) -> None:
    """Load the newest, train to `steps`, and in the save after it one rank ends by SIGKILL.

    where: "shard": rank 1, when half of its file is written; "manifest": rank 0, when the manifest is written
    and not renamed yet; "latest": the same of `latest`.
    """
    engine = start_engine(config)
    engine.load_checkpoint(folder)
    train_to(engine, steps)
    if where == "shard" and rank == 1:
        engine.checkpoint_engine.save = _half_a_file
    elif where != "shard" and rank == 0:
        _die_before_renaming(where)
    engine.save_checkpoint(folder)


def _half_a_file(state_dict: Any, path: str) -> None:
    buffer = io.BytesIO()
    torch.save(state_dict, buffer)
    with open(path, "wb") as file:
        file.write(buffer.getvalue()[: buffer.tell() // 2])
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)


def _die_before_renaming(where: str) -> None:
    rename = os.replace

    def die_or_rename(source: Any, target: Any) -> None:
        if where in Path(target).name:
            os.kill(os.getpid(), signal.SIGKILL)
        rename(source, target)

    os.replace = die_or_rename


def two_hosts(rank: int, world_size: int, config: dict[str, Any], folders: list[str], steps: int) -> Resumed:
    """Each rank is alone on its host, with a disk of its own: save, spoil rank 1's newest, load, go on."""
    before = os.environ["LOCAL_RANK"]
    os.environ["LOCAL_RANK"] = "0"
    try:
        train_and_save(rank, world_size, config, folders[rank], steps - 1, (steps - 2, steps - 1))
        if rank == 1:
            next(Path(folders[1], f"global_step{steps - 1}").glob("*optim_states.pt")).unlink()
        torch.distributed.barrier()
        return load_and_train(rank, world_size, config, folders[rank], steps)
    finally:
        os.environ["LOCAL_RANK"] = before


def background_writer(rank: int, world_size: int, config: dict[str, Any]) -> Failure:
    """An engine whose checkpoint writer is still writing when save_checkpoint returns."""
    engine = start_engine(config)
    from ds_ring.checkpoint.load import guard_checkpoints

    engine.checkpoint_engine.is_decoupled = lambda: True
    return catch_failure(lambda: guard_checkpoints(engine))
