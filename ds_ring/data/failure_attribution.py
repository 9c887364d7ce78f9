"""Attribute a torch.distributed error to the rank that failed first.

This file handles a RuntimeError of torch.distributed outside the ring: in the engine's collectives and in
those of the training script. It also waits for the messages of a pass before its results are used. The
failure detector (`health/failure_detector/`) decides which rank failed.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

import torch.distributed as dist

from ds_ring.comm.mesh import RingMesh
from ds_ring.config.section import RingConfig
from ds_ring.data.config_agreement import job_secret
from ds_ring.data.engine import DEEPSPEED, ENGINE
from ds_ring.data.run_folder import record_fault
from ds_ring.error_origins import is_distributed_error
from ds_ring.health.client import DetectorClient
from ds_ring.health.failure_detector.wire import Fault
from ds_ring.health.joining import join_detector
from ds_ring.health.stuck_waits import make_peer_error, verdict
from ds_ring.limits import Timeouts
from ds_ring.patches import AppliedPatch, apply, patch
from ds_ring.schedule.grid import Grid

P = ParamSpec("P")
T = TypeVar("T")
DEFAULT_HEARTBEAT_S = 10.0  # where the configuration could not be read
_detectors: weakref.WeakSet[DetectorClient] = weakref.WeakSet()
_hooked: list[AppliedPatch] = []  # once for a process
_SETTLED = "waits until all messages have arrived, since the result lasts"


# [Note: outside the ring]
# When a rank dies in `engine.step`, the others see a broken connection of gloo or NCCL, without a rank. The
# methods of the engine wait a moment for the detector's verdict and raise RingPeerError from it. Collectives
# of the script are not wrapped: their error stays as it is, and if it ends the process, the failed rank is
# printed before the traceback. A rank that hangs in a collective is ended by `health/client.py`.
def join_job(config: RingConfig | None) -> DetectorClient | None:
    """Join the failure detector of an initialised world, with the launcher's secret. Collective.

    Args:
        config: the section; None if this rank could not read it, which `agree_on_config` reports.

    Raises:
        RingPeerError, RingMeshError: of `health/joining.py`.
    """
    size = dist.get_world_size()
    heartbeat_s = DEFAULT_HEARTBEAT_S if config is None else config.heartbeat_timeout_seconds
    exit_after_s = None if config is None else config.hop_timeout_seconds
    timeouts = Timeouts() if config is None else config.timeouts
    detector = join_detector(
        Grid(size, size), heartbeat_s, exit_after_s, job_secret(), timeouts.limit("start")
    )
    if detector is not None:
        detector.report_collectives("ds_ring.initialize", timeouts.limit("start"))
        if not _hooked:
            _hooked.extend(apply(_print_failed_rank))
        _detectors.add(detector)
    return detector


# [Note: results that stay]
# On a GPU the host runs ahead of the messages. After a failed hop the device computes with invalid receive
# buffers, and only the watchdog's thread knows. So before parameters change, and before anything
# is saved, the host waits until the watchdog has seen every message, and raises the fault.
# Cost: at the last micro batch of a step the host waits for the last message of the backward pass, about a
# millisecond, and loses its lead over the device. With gradient clipping or fp16 DeepSpeed reads the norm on
# the host at this point anyway. A check without a wait would be free, but the optimizer could add garbage
# before the fault is known, and a script that catches the later error could continue with it.
# Another rank, whose own messages arrived, may have changed its part of the parameters. It cannot save them:
# saving is collective, and the rank whose step was refused does not take part. No GPU has measured the wait;
# `tests/dist/test_checkpoint.py` seeds the fault into real engines.
class SynchronizedResults:
    """Wait for all messages before a result lasts; a step that only accumulates gradients does not wait."""

    def __init__(self, engine: Any, mesh: RingMesh) -> None:
        self._engine, self._mesh = engine, mesh

    @patch(ENGINE, "step", stage="around_step", feature="settled", reason=_SETTLED)
    def around_step(self, step: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        if self._engine.is_gradient_accumulation_boundary():
            self._mesh.synchronize()
        return step(*args, **kwargs)

    @patch(
        ENGINE, "save_checkpoint", "save_16bit_model", "save_fp16_model", "module_state_dict",
        stage="around_save", feature="settled", reason=_SETTLED,
    )  # fmt: skip
    def around_save(self, save: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        self._mesh.synchronize()
        return save(*args, **kwargs)


# Methods with the deadline of a checkpoint; all others are parts of a step.
_OF_CHECKPOINTS = {
    "save_checkpoint", "load_checkpoint", "save_16bit_model", "save_fp16_model", "module_state_dict",
    "load_module_state_dict",
}  # fmt: skip


# The outermost patch: every method of the engine names the failed rank.
@patch(
    ENGINE, "forward", "backward", "step", "allreduce_gradients", "save_checkpoint", "load_checkpoint",
    "save_16bit_model", "save_fp16_model", "module_state_dict", "load_module_state_dict",
    "get_global_grad_norm", "destroy",
    stage="around_call", feature="culprits", reason="raises RingPeerError in place of a broken connection",
)  # fmt: skip
def attribute_engine_failure(mesh: RingMesh, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a method of the engine as `attribute_failure` does, with a deadline for the ranks that wait.

    The deadline is `checkpoint_timeout_seconds` for a method that saves or loads, else `hop_timeout_seconds`,
    or the longer time that a rank requests while it compiles ([Note: compile skew] in `cuda/patience.py`).
    """
    name = getattr(call, "__name__", "")
    limit = mesh.timeouts.limit("checkpoint" if name in _OF_CHECKPOINTS else "hop")
    limit = limit._replace(seconds=max(limit.seconds, mesh.state.patience_s))
    assert mesh.detector is not None
    with mesh.detector.within(f"engine.{name}", limit):
        return attribute_failure(mesh, call, *args, **kwargs)


def attribute_failure(mesh: RingMesh, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call; raise RingPeerError in place of its collectives' RuntimeError where another rank has failed."""
    try:
        return call(*args, **kwargs)
    except RuntimeError as error:
        detector = mesh.detector
        fault = _verdict_on(error, detector) if detector is not None and is_distributed_error(error) else None
        if detector is None or fault is None:
            raise
        detector.noticed = True
        raise make_peer_error(mesh.grid, detector.rank, None, fault) from error


def _verdict_on(error: BaseException, detector: DetectorClient) -> Fault | None:
    """Return which other rank has failed, if the monitor knows of one within a moment."""
    fault = verdict(detector, error)
    return None if fault is None or fault.rank == detector.rank else fault


@patch(
    DEEPSPEED.imported("sys"), "excepthook", stage="at_exit", feature="culprit_at_exit",
    reason="names the culprit before the traceback, and to the launcher",
)  # fmt: skip
def _print_failed_rank(
    before: Callable[..., object],
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
) -> None:
    """Print who failed before the traceback, where an error of torch.distributed ends this process."""
    report = sys.modules.get("ds_ring.measure.run_report")  # which counts steps, if it is there
    step = None if report is None else report.step_under_way()
    for detector in list(_detectors)[:1]:
        record_fault(detector.rank, error, step)
    if is_distributed_error(error, "__main__"):  # the script's own collectives
        for detector in list(_detectors):
            fault = _verdict_on(error, detector)
            if fault is not None:
                detector.noticed = True
                text = f"ds_ring: rank {fault.rank} has failed first: {fault.cause}"
                text += f". What follows is how rank {detector.rank} noticed"
                print(text, file=sys.stderr, flush=True)
                break
    before(kind, error, trace)
