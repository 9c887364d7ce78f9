"""Start DeepSpeed with a ring: `ds_ring.initialize`.

Owns the order of things at start (configuration, process groups, mesh, model, engine, loader) and what a ring
cannot allow DeepSpeed to do. What the engine gets on top, `engine.ring`, is `session.py`'s.
"""

from __future__ import annotations

import copy
import datetime
import logging
import sys
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.constants import TORCH_DISTRIBUTED_DEFAULT_PORT, default_pg_timeout
from deepspeed.runtime.engine import DeepSpeedEngine
from torch.utils.data import Dataset

from ds_ring.comm.mesh import RingMesh
from ds_ring.config.section import RingConfig, pattern_from_config, strip_section
from ds_ring.data.config_agreement import agree_on_config, rendezvous_settings, resolve_auto
from ds_ring.data.engine import DEEPSPEED, ENGINE
from ds_ring.data.engine_part import EngineStart, check_engine_parts, engine_parts
from ds_ring.data.failure_attribution import (
    SynchronizedResults,
    attribute_engine_failure,
    attribute_failure,
    join_job,
)
from ds_ring.data.loader import RingLoader, check_dataset
from ds_ring.data.run_folder import mark_ring, ranks_per_node, report_late_ranks
from ds_ring.data.session import RingSession
from ds_ring.engines.deepspeed.dynamic_ring import sizes_of
from ds_ring.engines.deepspeed.first_batch import FirstBatch
from ds_ring.engines.deepspeed.input_gradients import InputGradients
from ds_ring.engines.deepspeed.refusals import (
    RingUse,
    divides_twice,
    refuse_direct_backward,
    refuse_features,
    refuse_to_pickle,
    refuse_training,
    without_optimizer,
)
from ds_ring.errors import RingConfigError, RingError
from ds_ring.health.joining import leave_on_error
from ds_ring.health.rendezvous import wait_for_ranks
from ds_ring.limits import Timeouts
from ds_ring.patches import apply, imports_of, patch
from ds_ring.transports.devices import claim_device

log = logging.getLogger(__name__)

# torch 2.13 warns in every run that two collectives have new names; DeepSpeed 0.19.8 calls them by the old
# ones, which stay (2.15 names them as aliases and does not warn). A script cannot change that.
warnings.filterwarnings(
    "ignore", r"`torch\.distributed\.(all_gather_into|reduce_scatter)_tensor` is deprecated", FutureWarning
)

_start_engine = deepspeed.initialize  # which `ds_ring.enable` replaces

_sessions: weakref.WeakSet[RingSession] = weakref.WeakSet()  # of engines made so far

ConfigSource = str | dict[str, Any]


def initialize(
    args: Any = None,
    model: torch.nn.Module | None = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: Any = None,
    distributed_port: int = TORCH_DISTRIBUTED_DEFAULT_PORT,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[..., Any] | None = None,
    config: ConfigSource | None = None,
    **others: Any,
) -> tuple[DeepSpeedEngine, Any, RingLoader | None, Any]:
    """Call deepspeed.initialize with the ring that the "ring_attention" section of the JSON describes.

    The loader yields this rank's part of each batch; `engine.ring` (a `RingSession`) shards other batches:

        engine, optimizer, loader, scheduler = ds_ring.initialize(args=args, model=model, training_data=data)
        for batch in loader:
            loss = engine(**batch).loss
            engine.backward(loss)
            engine.step()

    `loss` is this rank's part of the exact token mean; `engine.ring.mean_loss(loss)` is the number to log.
    `engine.save_checkpoint` and `engine.load_checkpoint` use no checkpoint that is not whole.

    Args:
        others: `config_params`, an older name of config. DeepSpeed's `mpu` and `mesh_param` are refused.

    Raises:
        RingConfigError, RingMismatchError: what does not go with a ring, or differs between ranks.
    """
    ring_config, deepspeed_config, fault = None, dict[str, Any](), None
    try:
        config_params = others.pop("config_params", None)
        _refuse_arguments(model, mpu, training_data, others)
        source = _config_source(args, config, config_params)
        ring_config, deepspeed_config = _configurations(source, model, optimizer, lr_scheduler)
    except RingError as error:
        if not dist.is_initialized():
            raise  # no group to report it: the launcher ends the ranks that wait for this one
        fault = error  # raised below, on all ranks together
    timeouts = Timeouts() if ring_config is None else ring_config.timeouts
    device = init_distributed(distributed_port, dist_init_required, timeouts)
    detector = join_job(ring_config)  # before any collective of ours: from here on a dead rank is named
    if detector is not None:
        report_late_ranks(detector)
    compared = deepspeed_config | {"optimizer=": type(optimizer).__name__}
    per_node = agree_on_config(ring_config, compared, fault, detector, ranks_per_node())
    assert model is not None and ring_config is not None  # else there was a fault
    trains = optimizer is not None or bool((deepspeed_config.get("optimizer") or {}).get("type"))
    with leave_on_error(detector):
        ring_config.validate_world(dist.get_world_size())
    mesh = RingMesh.from_world(
        ring_config.ring_size,
        ring_config.ulysses_size,
        heartbeat_timeout_s=ring_config.heartbeat_timeout_seconds,
        exit_after_fault_s=ring_config.hop_timeout_seconds,
        detector=detector,
        ranks_per_node=per_node,
        timeouts=ring_config.timeouts,
    )
    # D of [Note: gradient scale].
    divisor = (
        1.0
        if deepspeed_config.get("gradient_allreduce_op", "mean") == "sum"
        else float(dist.get_world_size())
    )
    end_sessions_on(model)
    session = RingSession(ring_config, mesh, pattern_from_config(ring_config), device, divisor)
    _sessions.add(session)
    with session.ending_on_error():
        first_batch = FirstBatch(model, session, trains) if ring_config.get("verify_first_batch") else None
        wrapper: Any = None
        attached: list[Any] = []  # transformers is optional: where it is not imported, no model is one of its
        if _has_part_of_transformers(model):
            with imports_of("a model of transformers", "transformers"):
                from ds_ring.models.attach import attach
                from ds_ring.models.wrappers import wrapped_model
            attached = list(attach(model, session))
            wrapper = wrapped_model(model, session, attached)
        sizes = sizes_of(model) if ring_config.get("dynamic_ring") else None
        if getattr(args, "deepspeed_config", None) is not None:
            args = copy.copy(args)
            args.deepspeed_config = None  # DeepSpeed refuses a configuration twice, and gets ours as a dict
        engine, engine_optimizer, _, scheduler = attribute_failure(
            mesh, _start_engine,
            args=args, model=model, optimizer=optimizer, model_parameters=model_parameters,
            lr_scheduler=lr_scheduler, distributed_port=distributed_port,
            dist_init_required=dist_init_required, collate_fn=collate_fn,
            config=deepspeed_config if trains else without_optimizer(deepspeed_config),
        )  # fmt: skip
        if first_batch is not None:
            first_batch.engine = engine
        patches = _patches_of(engine, session, attached, wrapper, first_batch, trains)
        apply(*patches, session=session, engine=engine)
        for module in {engine.module, *(one.model for one in attached)}:
            apply(refuse_to_pickle, session=session, module=module)
        if sizes is not None:
            dtype = next(engine.module.parameters()).dtype
            attribute_failure(mesh, session.dynamic.start, sizes, session, dtype)
    loader = None
    if training_data is not None:
        loader = session.loader(
            training_data,
            engine.train_micro_batch_size_per_gpu(),
            shuffle=True,
            drop_last=engine.dataloader_drop_last(),
            collate_fn=collate_fn,
        )
        loader.on_batch = engine.tput_timer.start  # as DeepSpeed's: the timer covers loading, too
        apply(_training_dataloader.to(loader), session=session, engine=engine)
    if detector is not None:
        detector.report_collectives("the training script", ring_config.timeouts.limit("step"))
    return engine, engine_optimizer, loader, scheduler


def end_sessions_on(model: torch.nn.Module) -> None:
    """Take earlier rings off a model: the hooks of two would cut each batch twice."""
    parts = set(map(id, model.modules()))
    for session in list(_sessions):
        if any(id(change.owner) in parts for change in session.changes):
            session.end("its model was given to a later engine")


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


def _patches_of(
    engine: DeepSpeedEngine,
    session: RingSession,
    attached: list[Any],
    wrapper: Any,
    first_batch: FirstBatch | None,
    trains: bool,
) -> list[Any]:
    """Return the patches of an engine, from the inside out."""
    patches: list[Any] = [_ring.to(session), partial(_find_sharding, session), wrapper]
    patches += [InputGradients(session, engine), RingUse(session, engine, is_own=not attached)]
    if attached and session.config.check_modules and session.mesh.sequence_size > 1:
        from ds_ring.models.module_watch import ModuleWatch

        patches.append(ModuleWatch(session, engine, attached))
    patches.append(first_batch)
    speeds = session.config.get("rank_speeds", None)
    if speeds is not None and speeds != "measured":
        session.set_speeds(tuple(speeds))
    mark_ring()
    start = EngineStart(engine, session, attached, trains)
    for part in engine_parts():
        patches += part.patches(start)
    if not trains:
        patches.append(refuse_training)
    elif divides_twice(engine):
        patches.append(partial(refuse_direct_backward, engine))
    patches += [SynchronizedResults(engine, session.mesh), partial(_destroy, session)]
    if session.mesh.detector is not None:
        patches.append(partial(attribute_engine_failure, session.mesh))
    return [*(one for one in patches if one is not None), refuse_to_pickle]


@patch(ENGINE, "destroy", stage="around_call", feature="end", reason="takes the ring off the model")
def _destroy(session: RingSession, destroy: Callable[[], None]) -> None:
    destroy()
    session.end("engine.destroy() was called")


@_session_patch(
    stage="before_forward",
    reason="the session; finds the layout of each batch; engine.compile compiles only the model",
)
def _find_sharding(session: RingSession, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    session.check_at_work()
    if not session.batches.is_off:
        session.batches.select(x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor))


def _configurations(
    source: ConfigSource, model: torch.nn.Module | None, optimizer: object, scheduler: object
) -> tuple[RingConfig, dict[str, Any]]:
    """Return our section and DeepSpeed's part of the JSON, after all refusals that need no rank."""
    assert model is not None
    ring_config = RingConfig.from_deepspeed(source)
    deepspeed_config = strip_section(source)
    refuse_features(deepspeed_config, model)
    deepspeed_config = resolve_auto(deepspeed_config, model, optimizer is not None, scheduler is not None)
    check_engine_parts(ring_config, deepspeed_config)
    if _has_part_of_transformers(model):
        with imports_of("a model of transformers", "transformers"):
            from ds_ring.models.attach import check_model
        check_model(model, ring_config)
    return ring_config, deepspeed_config


def _has_part_of_transformers(model: torch.nn.Module) -> bool:
    """Return whether a model of transformers is inside `model`; without importing transformers."""
    kind = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    return kind is not None and any(isinstance(part, kind) for part in model.modules())


def _config_source(
    args: Any, config: ConfigSource | None, config_params: ConfigSource | None
) -> ConfigSource:
    """Return the one DeepSpeed configuration among the three places that deepspeed.initialize reads."""
    places = {
        "config": config,
        "config_params": config_params,
        "args.deepspeed_config": getattr(args, "deepspeed_config", None),
    }
    given = {name: value for name, value in places.items() if value is not None}
    if len(given) == 1:
        return next(iter(given.values()))
    got = " and ".join(given) if given else "none"
    raise RingConfigError.wrong(
        "ds_ring.initialize", "one DeepSpeed configuration", got, "pass config=path_or_dict"
    )


def _refuse_arguments(
    model: torch.nn.Module | None, mpu: Any, training_data: Any, others: dict[str, Any]
) -> None:
    if not isinstance(model, torch.nn.Module):
        raise RingConfigError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    mesh_param = others.pop("mesh_param", None)
    if mesh_param is not None:
        raise RingConfigError.wrong("mesh_param", "None", mesh_param, "set sequence_parallel_size instead")
    if others:
        raise TypeError(f"ds_ring.initialize() got an unexpected keyword argument {next(iter(others))!r}")
    if mpu is not None:
        raise RingConfigError.wrong("mpu", "None", type(mpu).__name__, "set ring_size and ulysses_size")
    if training_data is not None:
        check_dataset(training_data)


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
