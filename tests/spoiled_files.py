"""Checkpoints, files of a run and loader states that are spoilt at random, and everything that reads them.

tools/fuzz_files.py plays these rounds in a process of its own. A round raises a RingError, or nothing;
anything else is a fault of ds_ring.
"""

from __future__ import annotations

import io
import json
import math
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address
from torch.utils.data import DataLoader

from ds_ring.checkpoint import manifest, pickles, resize
from ds_ring.checkpoint.manifest import MANIFEST, OWNER
from ds_ring.errors import RingError
from ds_ring_launcher.cluster.cluster import Host
from ds_ring_launcher.run.relaunch import read_outcome
from ds_ring_launcher.run.run_folder import RankFault, RunFolder, write_exit, write_fault, write_json
from ds_ring_launcher.status.run_status import read_run
from ds_ring_launcher.status.table import make_tables
from tests.dist.test_loader import Numbered
from tests.hostile_pickles import HOSTILE, RAW, TWO_FLOATS, mutated, write
from tests.sessions import session_of

# What a value may become.


def odd(draw: random.Random) -> Any:
    """Return something that nobody expects there."""
    nested: Any = 1
    for _ in range(draw.choice((3, 60, 150))):
        nested = [nested] if draw.random() < 0.5 else {"a": nested}
    choices = [
        None, True, -1, 0, 7, 1 << 40, -(1 << 63), 1 << 70, 10**400, 0.5, 1e300, -1e300, math.nan, math.inf,
        "", "x", "x" * 5000, "\0", "../../etc", "\udcff", "<b>", "\x1b[2J", [], {}, [1, "a", None], nested,
    ]  # fmt: skip
    return draw.choice(choices)


def spoiled(value: Any, draw: random.Random) -> Any:
    """Return the value with one to three of its parts replaced, left out or doubled."""
    for _ in range(draw.randint(1, 3)):
        value = _one_change(value, draw)
    return value


def _one_change(value: Any, draw: random.Random) -> Any:
    if isinstance(value, dict) and value and draw.random() < 0.9:
        made, key = dict(value), draw.choice(list(value))
        match draw.randrange(8):
            case 0:
                del made[key]
            case 1:
                made[draw.choice(("x", "at", "rank", "step", "\udcff"))] = made[key]
            case _:
                made[key] = _one_change(made[key], draw)
        return made
    if isinstance(value, (list, tuple)) and value and draw.random() < 0.9:
        items, at = list(value), draw.randrange(len(value))
        match draw.randrange(5):
            case 0:
                del items[at]
            case 1:
                items.insert(at, items[at])
            case _:
                items[at] = _one_change(items[at], draw)
        return tuple(items) if isinstance(value, tuple) else items
    return odd(draw)


def spoil_file(path: Path, draw: random.Random) -> None:
    """Change bytes of a file, cut it short, or put something else in its place."""
    data = path.read_bytes() if path.is_file() and not path.is_symlink() else b"x"
    match draw.randrange(10):
        case 0:
            path.write_bytes(data[: draw.randrange(len(data) + 1)])
        case 1:
            path.write_bytes(draw.randbytes(draw.choice((0, 1, 100, 5000))))
        case 2:
            path.write_bytes(draw.choice((b"[", b'{"a":', b"(", b"\x80\x02(")) * draw.choice((100, 10**5)))
        case 3:
            path.unlink(missing_ok=True)
            draw.choice((os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)))(path)
        case _:
            path.write_bytes(mutated(data or b".", draw))


def rewrite(path: Path, draw: random.Random) -> None:
    """Change values of a JSON file, or of each line of one."""
    lines = [
        json.loads(line)
        for line in (path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()])
    ]
    at = draw.randrange(len(lines))
    lines[at] = spoiled(lines[at], draw)
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n")


# A checkpoint.


def states() -> dict[str, Any]:
    """Return what DeepSpeed's files hold, small."""
    weights, scaler = torch.nn.Linear(2, 3).state_dict(), DynamicLossScaler(2.0, 2.0, 9, 1.0, 2, False)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 1},
        "sequence_parallel_size": 1,
    }
    base = {"state": {0: {"step": torch.ones(1), "exp_avg": torch.ones(3), "exp_avg_sq": torch.ones(3)}}}
    base["param_groups"] = [{"lr": 0.1, "betas": (0.9, 0.99), "params": [0]}]
    optimizer = {
        "zero_stage": ZeroStageEnum.optimizer_states,
        "base_optimizer_state": base,
        "loss_scaler": scaler,
    }
    optimizer["param_slice_mappings"] = [{"weight": fragment_address(numel=6, start=0)}]
    model = {
        "module": weights, "ds_config": config, "dp_world_size": 1, "global_steps": 4, "lr_scheduler": None,
    }  # fmt: skip
    model["client"] = {
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "x": [1, (2.0, b"3"), {4}],
    }
    return {
        "mp_rank_00_model_states.pt": model,
        "zero_pp_rank_0_mp_rank_00_optim_states.pt": {"optimizer_state_dict": optimizer, "ds_config": config},
    }


_STATES: dict[str, Any] = {}


def checkpoint_round(draw: random.Random, root: Path) -> None:
    """Spoil a checkpoint, let its manifest fit or not, and read it."""

    if not _STATES:
        _STATES.update(states())
    folder, older = root / "global_step4", root / "global_step2"
    folder.mkdir()
    in_values = draw.random() < 0.3
    for number, (name, state) in enumerate(_STATES.items()):
        state = spoiled(state, draw) if in_values and number == draw.randrange(2) else state
        torch.save(state, folder / name, _use_new_zipfile_serialization=draw.random() < 0.8)
    if draw.random() < 0.2:  # of a universal one
        (folder / "zero").mkdir()
        torch.save({"zero_stage": odd(draw)}, folder / "zero" / "optimizer_state.pt")
    seal(folder, 4)
    shutil.copytree(folder, older)
    seal(older, 2)
    (root / "latest").write_text(folder.name)
    manifest.FolderLocks().claim(root)
    if not in_values:
        spoil_checkpoint(root, folder, draw)
    if draw.random() < 0.7:
        if not (folder / MANIFEST).is_dir():
            (folder / MANIFEST).unlink(missing_ok=True)
        if draw.random() < 0.5:
            manifest.accept_checkpoint(root, folder.name)
        elif not (folder / MANIFEST).is_dir():
            seal(folder, draw.choice((4, -1, 1 << 60)))
    with every() as act:
        act(lambda: manifest.verify_checkpoint(root))
        act(lambda: manifest.earlier_tags(root, folder.name))
        act(lambda: manifest.unfinished_tags(root))
        act(lambda: manifest.require_forward(root, 4))
        act(lambda: claim(root))
        act(lambda: pickles.require_weights_only(folder, manifest.files_in(folder)))
        act(lambda: load_all(folder))
        act(lambda: resize.count_ranks(folder))
        act(lambda: resize.count_step_samples(root, folder.name))
        act(lambda: resize.resize_checkpoint(root) if draw.random() < 0.05 else None)
        act(lambda: resize.read_stage(folder) if manifest.is_universal(folder) else None)


def spoil_checkpoint(root: Path, folder: Path, draw: random.Random) -> None:
    """Change a file of it, or a value of a pickle, the manifest or the owner's file."""
    path = folder / draw.choice(list(_STATES))
    match draw.randrange(8):
        case 0:
            spoil_file(draw.choice((path, folder / MANIFEST, root / "latest", root / OWNER)), draw)
        case 1:
            rewrite(draw.choice((folder / MANIFEST, root / OWNER)), draw)
        case 2:
            (root / "latest").write_text(str(odd(draw)), errors="replace")
        case 3:
            (folder / draw.choice((f"{MANIFEST}.pt", ".nfs0", "more.pt", "\udcff"))).write_bytes(b"x")
        case 4:
            name = draw.choice(list(HOSTILE))
            write(path, HOSTILE[name], TWO_FLOATS, RAW.get(name))
        case _:
            buffer = io.BytesIO()
            torch.save(_STATES[path.name], buffer)
            reader = torch._C.PyTorchFileReader(io.BytesIO(buffer.getvalue()))
            names = [name for name in reader.get_all_records() if name.startswith("data/")]
            records = {name.removeprefix("data/"): reader.get_record(name) for name in names}
            write(path, None, records, mutated(reader.get_record("data.pkl"), draw))


def seal(folder: Path, steps: int) -> None:
    """Write a manifest that fits, as whoever may write there could."""
    files = manifest.record_files(folder, list(manifest.files_in(folder)))
    manifest.write_manifest(folder, files, steps)


def claim(root: Path) -> None:
    """Lock the folder as a later attempt; what calls it gives a type to an OSError."""
    with suppress(OSError):
        manifest.FolderLocks(manifest.Attempt("run", 2, "token")).claim(root)


def load_all(folder: Path) -> None:
    """Read every pickle as DeepSpeed's load does under our engine, once all have passed."""

    paths = list(manifest.files_in(folder))
    pickles.require_weights_only(folder, paths)
    with pickles.weights_only_below(folder):
        for path in paths:
            if path.endswith(".pt"):
                torch.load(folder / path, weights_only=False)


@contextmanager
def every() -> Iterator[Callable[[Callable[[], object]], None]]:
    """Yield what calls a function; the first typed error is raised when all have been called."""
    errors: list[RingError] = []

    def act(read: Callable[[], object]) -> None:
        try:
            read()
        except RingError as error:
            errors.append(error)

    yield act
    if errors:
        raise errors[0]


# A run, and a loader.


def run_round(draw: random.Random, root: Path) -> None:
    """Spoil files of a run with two attempts, and show it."""
    run, now = RunFolder(root / "run"), time.time()
    for attempt in (1, 2):
        run.start_attempt("token")
        started = {"engine": "torchrun", "hosts": {"node-0": 2}, "world_size": 2, "missing": {}}
        run.record("start", attempt, **started, checkpoints=str(root / "checkpoints"))
        folder = run.attempt(attempt)
        link = {"from": 1, "hops": 2, "hop_seconds": 0.01, "wait_seconds": 0.001, "bytes": 9}
        figures = {
            "rank": 0, "at": now, "step": 3, "loss": 1.0, "memory_bytes": 5, "links": [link],
            "world_size": 2,
        }  # fmt: skip
        write_json(folder / "rank-0.metrics.json", figures)
        write_json(
            folder / "rank-1.late.json", {"rank": 1, "at": now, "seconds": 3.0, "what": "x", "where": "y"}
        )
        (folder / "history.jsonl").write_text(json.dumps({"step": 1, "at": now, "loss": 4.0}) + "\n")
        (folder / "rank-0.log").touch()
        write_fault(folder, RankFault(1, now, 3, "error", "ValueError", "x", ("a.py:1",), "trace", None))
        write_exit(folder, 0, 1)
        run.record("fault", attempt, kind="error", rank=1, host="node-0", step=4, what="x", frames=["a.py:1"])
        run.record("end", attempt, status=1, verdict="failed", next="again", why="x", wait_seconds=1.0)
    write_json(run.path / "launcher.json", {"at": now, "host": "node-0", "pid": 1, "token": "token"})
    (root / "checkpoints").mkdir()
    (root / "checkpoints" / "latest").write_text("global_step4")
    files = sorted(path for path in root.rglob("*") if path.is_file())
    for _ in range(draw.randint(1, 3)):
        path = draw.choice(files)
        if (
            path.suffix in (".json", ".jsonl")
            and draw.random() < 0.6
            and path.is_file()
            and path.stat().st_size
        ):
            try:
                rewrite(path, draw)
            except (ValueError, OSError):  # what has been spoiled before
                spoil_file(path, draw)
        elif not path.is_dir() and not (path.exists() and not path.is_file()):
            spoil_file(path, draw)
    with every() as act:
        act(lambda: make_tables(read_run(run.path), 8))
        act(lambda: json.dumps(read_run(run.path).document(), allow_nan=False))
        hosts = (Host(name="node-0", slots=2),)
        for attempt in (1, 2):
            act(lambda: read_outcome(attempt, run.attempt(attempt), hosts, 1, None, False))  # noqa: B023


def loader_round(draw: random.Random, root: Path) -> None:
    """Spoil the state of a loader, load it, and read on."""
    session = session_of()
    shuffled = DataLoader(Numbered(), 2, shuffle=True, generator=torch.Generator())
    plain = DataLoader(Numbered(), 2, shuffle=True)
    loader = draw.choice((
        lambda: session.loader(Numbered(), 2, shuffle=True), lambda: session.wrap(shuffled),
        lambda: session.wrap(plain), lambda: session.wrap(list(plain), split=True),
    ))()  # fmt: skip
    state = loader.state_dict()
    if draw.random() < 0.5:
        next(iter(loader))
        state = loader.state_dict()
    loader.load_state_dict(spoiled(state, draw))
    for _ in range(2):
        list(loader)
