"""The steps of `ds_ring.initialize` that call DeepSpeed: process groups, engine, its patches, loader."""

from __future__ import annotations

import copy
import datetime
import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.constants import TORCH_DISTRIBUTED_DEFAULT_PORT, default_pg_timeout
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils import set_z3_leaf_module

from ds_ring.comm.mesh import RingMesh
from ds_ring.config.section import RingConfig
from ds_ring.data.batch import check_keywords
from ds_ring.data.config_agreement import agree_on_config, rendezvous_settings
from ds_ring.data.engine import DEEPSPEED, ENGINE
from ds_ring.data.engine_part import AttachedModels, EngineStart, engine_parts
from ds_ring.data.failure_attribution import (
    SynchronizedResults,
    attribute_engine_failure,
    attribute_failure,
    join_job,
)
from ds_ring.data.loader import RingLoader
from ds_ring.data.run_folder import mark_ring, ranks_per_node, report_late_ranks
from ds_ring.data.session import RingSession, end_session
from ds_ring.engines.deepspeed.backward import DividedOnce, UnseenBackward, keep_micro_batches
from ds_ring.engines.deepspeed.input_gradients import InputGradients
from ds_ring.engines.deepspeed.refusals import (
    RingUse,
    divides_twice,
    refuse_direct_backward,
    refuse_to_pickle,
    refuse_training,
    without_optimizer,
)
from ds_ring.errors import RingConfigError, RingError
from ds_ring.health.joining import leave_on_error
from ds_ring.health.rendezvous import wait_for_ranks
from ds_ring.limits import Timeouts
from ds_ring.patches import applied, apply, patch
from ds_ring.transports.devices import claim_device

log = logging.getLogger(__name__)

# torch 2.13 warns in every run that two collectives have new names; DeepSpeed 0.19.8 calls them by the old
# ones, which stay (2.15 names them as aliases and does not warn). A script cannot change that.
warnings.filterwarnings(
    "ignore", r"`torch\.distributed\.(all_gather_into|reduce_scatter)_tensor` is deprecated", FutureWarning
)

_start_engine = deepspeed.initialize  # which `ds_ring.enable` replaces


class EngineArguments(NamedTuple):
    """The arguments of `ds_ring.initialize` that DeepSpeed gets, but for the configuration."""

    args: Any
    model: torch.nn.Module | None
    optimizer: Any
    model_parameters: Any
    training_data: Any
    lr_scheduler: Any
    distributed_port: int
    dist_init_required: bool | None
    collate_fn: Callable[..., Any] | None

    @property
    def module(self) -> torch.nn.Module:
        """Return the model, after it has been checked."""
        assert self.model is not None
        return self.model


@dataclass(frozen=True)
class Configuration:
    """What this rank read of the JSON; empty if it raised `fault`, which no other rank knows yet.

    Attributes:
        section: ours; `ring` where it was read.
        deepspeed: DeepSpeed's part.
        trains: whether there is an optimizer.
    """

    section: RingConfig | None = None
    deepspeed: dict[str, Any] = field(default_factory=dict)
    trains: bool = False
    fault: RingError | None = None

    @property
    def ring(self) -> RingConfig:
        """Return our section, after `start_groups` has raised the fault of any rank."""
        assert self.section is not None
        return self.section


def start_groups(arguments: EngineArguments, configuration: Configuration) -> tuple[RingMesh, torch.device]:
    """Start the process groups, and compare the configurations of all ranks. Collective.

    Raises:
        RingError: this rank's fault, on all ranks.
        RingMismatchError: configurations that differ.
    """
    section = configuration.section
    timeouts = Timeouts() if section is None else section.timeouts
    device = init_distributed(arguments.distributed_port, arguments.dist_init_required, timeouts)
    detector = join_job(section)  # before any collective of ours: from here on a dead rank is named
    if detector is not None:
        report_late_ranks(detector)
    compared = configuration.deepspeed | {"optimizer=": type(arguments.optimizer).__name__}
    per_node = agree_on_config(section, compared, configuration.fault, detector, ranks_per_node())
    config = configuration.ring
    with leave_on_error(detector):
        config.validate_world(dist.get_world_size())
    mesh = RingMesh.from_world(
        config.ring_size,
        config.ulysses_size,
        heartbeat_timeout_s=config.heartbeat_timeout_seconds,
        exit_after_fault_s=config.hop_timeout_seconds,
        detector=detector,
        ranks_per_node=per_node,
        timeouts=timeouts,
    )
    return mesh, device


def start_engine(
    arguments: EngineArguments, configuration: Configuration, session: RingSession
) -> tuple[DeepSpeedEngine, Any, Any]:
    """Call deepspeed.initialize; return engine, optimizer and scheduler."""
    for module in session.needs.gathered_once:
        set_z3_leaf_module(module, True)
    config, values = configuration.deepspeed, arguments._asdict() | {"training_data": None}
    if getattr(arguments.args, "deepspeed_config", None) is not None:
        values["args"] = args = copy.copy(arguments.args)
        args.deepspeed_config = None  # DeepSpeed refuses a configuration twice, and gets ours as a dict
    config = config if configuration.trains else without_optimizer(config)
    with applied(_flatten):
        engine, optimizer, _, scheduler = attribute_failure(
            session.run_mesh, _start_engine, config=config, **values
        )
    return engine, optimizer, scheduler


def patch_engine(
    engine: DeepSpeedEngine, session: RingSession, attached: AttachedModels, trains: bool
) -> None:
    """Apply the patches of an engine and of its model, and measure the ranks for a dynamic ring."""
    apply(*_make_patches(engine, session, attached, trains), session=session, engine=engine)
    for module in {engine.module, *(adapter.model for adapter in attached.adapters)}:
        apply(refuse_to_pickle, session=session, module=module)
    if session.dynamic.sizes is not None:
        dtype = next(engine.module.parameters()).dtype
        attribute_failure(session.run_mesh, session.dynamic.start, session, dtype)


def make_loader(
    arguments: EngineArguments, engine: DeepSpeedEngine, session: RingSession
) -> RingLoader | None:
    """Return the loader of the training data, if there is some; the start of the engine ends here."""
    loader = None
    if arguments.training_data is not None:
        loader = session.loader(
            arguments.training_data,
            engine.train_micro_batch_size_per_gpu(),
            shuffle=True,
            drop_last=engine.dataloader_drop_last(),
            collate_fn=arguments.collate_fn,
        )
        loader.on_batch = engine.tput_timer.start  # as DeepSpeed's: the timer covers loading, too
        apply(_training_dataloader.to(loader), session=session, engine=engine)
    if session.run_mesh.detector is not None:
        session.run_mesh.detector.report_collectives(
            "the training script", session.config.timeouts.limit("step")
        )
    return loader


_session_patch = partial(patch, ENGINE, feature="session")
_ring = _session_patch(
    "ring", stage="at_initialize", kind="added", reason="the session; finds the layout of each batch"
)
_training_dataloader = patch(
    ENGINE, "training_dataloader", stage="at_initialize", kind="set", feature="loader",
    reason="each rank reads its tokens", when="training_data is given",
)  # fmt: skip
_shm = patch(
    DEEPSPEED.imported("deepspeed.ops.__compatible_ops__"), "deepspeed_shm_comm", stage="at_initialize",
    kind="set", feature="gloo", when="the device is the CPU",
    reason="its build takes two minutes and needs ninja; gloo serves without it",
)  # fmt: skip


def _make_patches(
    engine: DeepSpeedEngine, session: RingSession, attached: AttachedModels, trains: bool
) -> list[Any]:
    """Return the patches of an engine, from the inside out."""
    adapters, first_batch = attached.adapters, attached.first_batch
    patches: list[Any] = [_ring.to(session), partial(_find_sharding, session), attached.wrapper]
    patches += [InputGradients(session, engine), RingUse(session, engine, is_own=not adapters)]
    if attached.watch is not None:
        patches.append(attached.watch(session, engine, adapters))
    if first_batch is not None:
        first_batch.engine = engine
        patches.append(first_batch)
    mark_ring()
    start = EngineStart(engine, session, adapters, trains)
    for part in engine_parts():
        patches += part.patches(start)
    if not trains:
        patches.append(refuse_training)
    elif divides_twice(engine):
        patches.append(partial(refuse_direct_backward, engine))
    if trains:
        patches += [UnseenBackward(session), DividedOnce(engine)]
        if engine.zero_optimization_stage() == 2:
            patches.append(partial(keep_micro_batches, engine))
    patches += [SynchronizedResults(engine, session.run_mesh), partial(_destroy, session)]
    if session.run_mesh.detector is not None:
        patches.append(partial(attribute_engine_failure, session.run_mesh))
    return [*(replacement for replacement in patches if replacement is not None), refuse_to_pickle]


@patch(ENGINE, "destroy", stage="around_call", feature="end", reason="takes the ring off the model")
def _destroy(session: RingSession, destroy: Callable[[], None]) -> None:
    destroy()
    end_session(session, "engine.destroy() was called")


@_session_patch(
    stage="before_forward",
    reason="the session; finds the layout of each batch; engine.compile compiles only the model",
)
def _find_sharding(session: RingSession, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    session.sharder.check_at_work()
    if not session.batches.is_off:
        check_keywords(kwargs)
        session.batches.select(x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor))


@patch(
    DEEPSPEED.imported("deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer"),
    "flatten_dense_tensors_aligned", stage="at_initialize", feature="flat parameters",
    reason="DeepSpeed 0.18.7 to 0.18.9 let the flat buffer require gradients, and crash: it does not",
)  # fmt: skip
def _flatten(flatten: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
    return flatten(*args, **kwargs).detach()


def leave_shm_out() -> None:
    """Let gloo carry DeepSpeed's collectives on the CPU, without building an operator for it."""
    if get_accelerator().device_name() == "cpu":
        apply(_shm.to(False))
        log.info("deepspeed_shm_comm is not built: gloo carries DeepSpeed's collectives on the CPU")


def init_distributed(
    distributed_port: int = TORCH_DISTRIBUTED_DEFAULT_PORT,
    dist_init_required: bool | None = None,
    timeouts: Timeouts | None = None,
) -> torch.device:
    """Start (or find) the process groups; return this rank's device, made current.

    torch gives up on a collective of the default group after DeepSpeed's own limit, and not before the
    longest of `timeouts`.
    """
    timeouts = timeouts or Timeouts()
    _claim_gpu()
    where = None if dist.is_initialized() or dist_init_required is False else rendezvous_settings()
    store = None if where is None or where.world_size == 1 else wait_for_ranks(where, timeouts.limit("start"))
    longest = datetime.timedelta(seconds=2 * max(timeouts))
    leave_shm_out()
    try:
        deepspeed.init_distributed(
            dist_backend=get_accelerator().communication_backend_name(),
            distributed_port=distributed_port,
            dist_init_required=dist_init_required,
            timeout=max(default_pg_timeout, longest),
        )
    except ModuleNotFoundError as error:
        if error.name != "mpi4py":
            raise
        raise RingConfigError(
            "expected a process that a launcher has started, got none of RANK, WORLD_SIZE, LOCAL_RANK,"
            " MASTER_ADDR and MASTER_PORT; start it by torchrun or `ds-ring launch`"
        ) from error
    del store  # torch has a connection of its own now
    _claim_gpu()  # a rank that MPI has started knows its local rank only now
    local_rank = deepspeed.comm.get_local_rank()
    get_accelerator().set_device(local_rank)
    return torch.device(get_accelerator().device_name(local_rank))


def _claim_gpu() -> None:
    if get_accelerator().device_name() == "cuda":
        claim_device(torch.cuda.device_count())
