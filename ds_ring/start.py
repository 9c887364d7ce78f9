"""Start DeepSpeed with a ring: `ds_ring.initialize`.

Owns the order of the steps. It alone knows the batch (`data`), the engine (`engines/deepspeed`) and the
models of transformers (`models`); neither of the last two knows the other.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.constants import TORCH_DISTRIBUTED_DEFAULT_PORT
from deepspeed.runtime.engine import DeepSpeedEngine
from torch.utils.data import Dataset

from ds_ring.comm.mesh import RingMesh
from ds_ring.compat import get_imported
from ds_ring.compat.untried import note_untried
from ds_ring.config.section import RingConfig, pattern_from_config, strip_section
from ds_ring.data.config_agreement import resolve_auto
from ds_ring.data.dynamic_ring.sample_times import read_model_sizes
from ds_ring.data.engine_part import AttachedModels, engine_parts
from ds_ring.data.loader import RingLoader, check_dataset
from ds_ring.data.session import RingSession, end_session, ending_on_error
from ds_ring.engines.deepspeed.initialize import (
    Configuration,
    EngineArguments,
    make_loader,
    patch_engine,
    start_engine,
    start_groups,
)
from ds_ring.engines.deepspeed.refusals import refuse_features
from ds_ring.errors import RingConfigError, RingError
from ds_ring.patches import guard_imports
from ds_ring.plugin import HOOKS, load

_sessions: weakref.WeakSet[RingSession] = weakref.WeakSet()  # of engines made so far

ConfigSource = str | dict[str, Any]


def initialize(
    args: Any = None, model: torch.nn.Module | None = None, optimizer: Any = None,
    model_parameters: Any = None, training_data: Dataset[Any] | None = None, lr_scheduler: Any = None,
    distributed_port: int = TORCH_DISTRIBUTED_DEFAULT_PORT, mpu: Any = None,
    dist_init_required: bool | None = None, collate_fn: Callable[..., Any] | None = None,
    config: ConfigSource | None = None, **others: Any,
) -> tuple[DeepSpeedEngine, Any, RingLoader | None, Any]:  # fmt: skip
    """Call deepspeed.initialize with the ring that the "ring_attention" section of the JSON describes.

    The loader yields this rank's part of each batch; `engine.ring` (a `RingSession`) shards other batches:

        engine, optimizer, loader, scheduler = ds_ring.initialize(args=args, model=model, training_data=data)
        for batch in loader:
            loss = engine(**batch).loss
            engine.backward(loss)
            engine.step()

    `loss` is this rank's part of the exact token mean; `engine.ring.mean_loss(loss)` is the number to log.
    `others` is `config_params`, an older name of config. DeepSpeed's `mpu` and `mesh_param` are refused.

    Raises:
        RingConfigError, RingMismatchError: what does not go with a ring, or differs between ranks.
    """
    arguments = EngineArguments(
        args, model, optimizer, model_parameters, training_data, lr_scheduler, distributed_port,
        dist_init_required, collate_fn,
    )  # fmt: skip
    note_untried()
    configuration = _read_configuration(arguments, mpu, config, others)
    mesh, device = start_groups(arguments, configuration)
    session = _make_session(arguments, configuration, mesh, device)
    with ending_on_error(session):
        attached = _attach_models(arguments.module, configuration.trains, session)
        engine, engine_optimizer, scheduler = start_engine(arguments, configuration, session)
        patch_engine(engine, session, attached, configuration.trains)
    loader = make_loader(arguments, engine, session)
    return engine, engine_optimizer, loader, scheduler


def _read_configuration(
    arguments: EngineArguments, mpu: Any, config: ConfigSource | None, others: dict[str, Any]
) -> Configuration:
    """Read the JSON, and refuse what needs no rank; an error is kept where other ranks can hear of it."""
    try:
        config_params = others.pop("config_params", None)
        _refuse_arguments(arguments, mpu, others)
        source = _choose_source(arguments.args, config, config_params)
        ring_config, module = RingConfig.from_deepspeed(source), arguments.module
        deepspeed_config = strip_section(source)
        refuse_features(deepspeed_config, module)
        has_optimizer, has_scheduler = arguments.optimizer is not None, arguments.lr_scheduler is not None
        deepspeed_config = resolve_auto(deepspeed_config, module, has_optimizer, has_scheduler)
        for part in engine_parts():
            part.check(ring_config, deepspeed_config)
        if _contains_transformers(module):
            with guard_imports("a model of transformers", "transformers"):
                from ds_ring.models.attach import check_model
            check_model(module, ring_config)
    except RingError as error:
        if not dist.is_initialized():
            raise  # no group to report it: the launcher ends the ranks that wait for this one
        return Configuration(fault=error)  # raised by `start_groups`, on all ranks together
    trains = has_optimizer or bool((deepspeed_config.get("optimizer") or {}).get("type"))
    return Configuration(ring_config, deepspeed_config, trains)


def _make_session(
    arguments: EngineArguments, configuration: Configuration, mesh: RingMesh, device: torch.device
) -> RingSession:
    """Make the session of a ring, and take earlier rings off the model: two would cut each batch twice."""
    parts = set(map(id, arguments.module.modules()))
    for session in list(_sessions):
        if any(id(change.owner) in parts for change in session.changes):
            end_session(session, "its model was given to a later engine")
    # D of [Note: gradient scale].
    sums = configuration.deepspeed.get("gradient_allreduce_op", "mean") == "sum"
    divisor = 1.0 if sums else float(dist.get_world_size())
    ring_config = configuration.ring
    session = RingSession(ring_config, mesh, pattern_from_config(ring_config), device, divisor)
    _sessions.add(session)
    return session


def _attach_models(module: torch.nn.Module, trains: bool, session: RingSession) -> AttachedModels:
    """Attach the transformers models inside a module to the ring; transformers is optional."""
    config = session.config
    verifies = config.get("verify_first_batch")
    first_batch = load(HOOKS["FirstBatch"])(module, session, trains) if verifies else None
    attached = AttachedModels(first_batch=first_batch)
    if _contains_transformers(module):  # where it is not imported, no model is one of its
        with guard_imports("a model of transformers", "transformers"):
            from ds_ring.models.attach import attach
            from ds_ring.models.module_watch import ModuleWatch
            from ds_ring.models.wrappers import wrap_model
        adapters = list(attach(module, session))
        attached = attached._replace(adapters=adapters, wrapper=wrap_model(module, session, adapters))
        if adapters and config.check_modules and session.run_mesh.sequence_size > 1:
            attached = attached._replace(watch=ModuleWatch)
    if config.get("dynamic_ring"):
        session.dynamic.sizes = read_model_sizes(module)
    return attached


def _contains_transformers(module: torch.nn.Module) -> bool:
    """Return whether a model of transformers is inside a module; without importing transformers."""
    kind = get_imported("transformers.modeling_utils", "PreTrainedModel")
    return kind is not None and any(isinstance(part, kind) for part in module.modules())


def _choose_source(
    args: Any, config: ConfigSource | None, config_params: ConfigSource | None
) -> ConfigSource:
    """Return the one DeepSpeed configuration among the three places that deepspeed.initialize reads."""
    places = {
        "config": config,
        "config_params": config_params,
        "args.deepspeed_config": getattr(args, "deepspeed_config", None),
    }
    sources = {name: value for name, value in places.items() if value is not None}
    if len(sources) == 1:
        return next(iter(sources.values()))
    got = " and ".join(sources) if sources else "none"
    raise RingConfigError.wrong(
        "ds_ring.initialize", "one DeepSpeed configuration", got, "pass config=path_or_dict"
    )


def _refuse_arguments(arguments: EngineArguments, mpu: Any, others: dict[str, Any]) -> None:
    if not isinstance(arguments.model, torch.nn.Module):
        raise RingConfigError(f"model: expected a torch.nn.Module, got {type(arguments.model).__name__}")
    mesh_param = others.pop("mesh_param", None)
    if mesh_param is not None:
        raise RingConfigError.wrong("mesh_param", "None", mesh_param, "set sequence_parallel_size instead")
    if others:
        raise TypeError(f"ds_ring.initialize() got an unexpected keyword argument {next(iter(others))!r}")
    if mpu is not None:
        raise RingConfigError.wrong("mpu", "None", type(mpu).__name__, "set ring_size and ulysses_size")
    if arguments.training_data is not None:
        check_dataset(arguments.training_data)
