"""One trial of a length: the model on ranks of its own, and two DeepSpeed steps.

A length that runs out of memory is too long. On the CPU `memory_gib` limits the memory that each rank may
allocate after its start (RLIMIT_DATA); on a GPU its memory is the limit.
"""

from __future__ import annotations

import importlib
import resource
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import llama, make_engine

from ds_ring.errors import RingError
from ds_ring_launcher.run.local_ranks import RanksError, run_ranks

GIB = 1 << 30
_NO_MEMORY = ("can't allocate memory", "out of memory", "Cannot allocate memory", "not enough memory")


class TooLongError(RingError, RuntimeError):
    """Report that a rank ran out of memory."""


class Trial(NamedTuple):
    """Describe one run; `sizes` are those of `common.llama`."""

    device: str
    ranks: int
    tokens: int
    sizes: dict[str, Any]
    section: dict[str, Any]
    stage: int
    offload: bool
    memory_gib: float


def trial_rank(trial: Trial) -> tuple[float, float]:
    """Make two steps on one rank; return the seconds of the second one, and its peak in bytes on a GPU."""
    importlib.import_module("ds_ring.models.attention")  # not counted: modules
    if trial.device == "cpu":
        held = next(line for line in Path("/proc/self/status").read_text().splitlines() if "VmData" in line)
        limit = int(held.split()[1]) * 1024 + int(trial.memory_gib * GIB)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    try:
        return two_steps(trial)
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, MemoryError) or any(words in str(error) for words in _NO_MEMORY):
            raise TooLongError(f"out of memory: {str(error)[:200]}") from error
        raise


def two_steps(trial: Trial) -> tuple[float, float]:
    """Train for two steps, in a process group that is there."""
    cuda = trial.device == "cuda"
    with torch.device(trial.device):
        model = llama(trial.tokens, **trial.sizes, dtype=torch.bfloat16 if cuda else torch.float32)
    model.activation_checkpointing_enable({"use_reentrant": False})
    zero: dict[str, Any] = {"stage": trial.stage}
    if trial.offload:  # optimizer, and at stage 3 parameters, on the host
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": cuda}
        if trial.stage == 3:
            zero["offload_param"] = {"device": "cpu", "pin_memory": cuda}
    section = trial.section | {"hop_timeout_seconds": 600, "heartbeat_timeout_seconds": 60}
    keys: dict[str, Any] = {"bf16": {"enabled": cuda}, "zero_force_ds_cpu_optimizer": False}
    if cuda:
        # torch's own on the device: DeepSpeed's would be compiled first
        keys["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-5, "torch_adam": not trial.offload}}
    engine = make_engine(model, trial.ranks, section, zero, **keys)
    ids = torch.arange(trial.tokens)[None] % trial.sizes["vocab"]
    batch = engine.ring.shard_batch({"input_ids": ids, "labels": ids})
    seconds = 0.0
    for _ in range(2):
        started = time.perf_counter()
        engine.backward(engine(**batch).loss)
        engine.step()
        torch.distributed.barrier()
        seconds = time.perf_counter() - started
    peak = torch.cuda.max_memory_allocated() if trial.device == "cuda" else 0
    return seconds, float(peak)


def attempt(trial: Trial, deadline_s: float, imported: bool = False) -> dict[str, Any]:
    """Try one length, and return how it went; `imported` is that of `run_ranks`."""
    row: dict[str, Any] = {"tokens": trial.tokens}
    try:
        results = run_ranks(
            trial_rank, trial.ranks, (trial,), threads=1, deadline_s=deadline_s, imported=imported
        )
        row |= {"fits": True, "step_seconds": round(max(seconds for seconds, _ in results), 2)}
        if trial.device == "cuda":
            row["peak_gib"] = round(max(peak for _, peak in results) / GIB, 2)
    except RanksError as error:
        if not any(words in str(error) for words in (*_NO_MEMORY, "bad_alloc", "MemoryError")):
            raise
        row |= {"fits": False}
    return row
