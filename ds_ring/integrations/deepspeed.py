"""`ds_ring.initialize`: deepspeed.initialize with a ring.

Owns the order of things at start (configuration, process groups, mesh, model, engine, loader) and what a ring
cannot allow DeepSpeed to do. What the engine gets on top, `engine.ring`, is `session.py`'s.
"""

from __future__ import annotations

import copy
import functools
import logging
import sys
from collections.abc import Callable
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.constants import TORCH_DISTRIBUTED_DEFAULT_PORT
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.engine import DeepSpeedEngine
from torch.utils.data import Dataset

from ds_ring.config import RingConfig, strip_section
from ds_ring.errors import RingConfigError, RingError
from ds_ring.integrations.checkpoint import guard_checkpoints
from ds_ring.integrations.config_agreement import agree_on_config
from ds_ring.integrations.loader import RingLoader, check_dataset
from ds_ring.integrations.session import RingSession
from ds_ring.runtime.mesh import RingMesh
from ds_ring.schedule.pattern_config import pattern_from_config

log = logging.getLogger(__name__)

_DEFAULT_BACKEND = get_accelerator().get_compile_backend()  # engine.compile's

Source = str | dict[str, Any]


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
    config: Source | None = None,
    mesh_param: Any = None,
    config_params: Source | None = None,
) -> tuple[DeepSpeedEngine, Any, RingLoader | None, Any]:
    """deepspeed.initialize's arguments and result; the "ring_attention" section of the JSON says the rest.

    The loader yields this rank's part of each batch, and `engine.ring` (a `RingSession`) shards batches of
    other loaders, so an ordinary loop stays as it is:

        engine, optimizer, loader, scheduler = ds_ring.initialize(args=args, model=model, training_data=data)
        for batch in loader:
            loss = engine(**batch).loss
            engine.backward(loss)
            engine.step()

    `loss` is this rank's part of the exact token mean; `engine.ring.mean_loss(loss)` is the number to log.
    `engine.save_checkpoint` and `engine.load_checkpoint` have DeepSpeed's arguments and results, and use no
    checkpoint that is not whole (checkpoint.py).

    Raises:
        RingConfigError: the JSON, an argument or the model does not go with a ring.
        RingMismatchError: another rank refused to start, or has another configuration; names rank and key.
    """
    ring_config, deepspeed_config, fault = None, {}, None
    try:
        source = _config_source(args, config, config_params)
        _refuse_arguments(model, mpu, mesh_param, training_data)
        ring_config = RingConfig.from_deepspeed(source)
        deepspeed_config = strip_section(source)
        _refuse_inexact_gradients(deepspeed_config)
        _refuse_model(model, ring_config)
    except RingError as error:
        if not dist.is_initialized():
            raise  # nobody hears of it: the launcher ends the ranks that wait for this one
        fault = error
    device = _init_distributed(distributed_port, dist_init_required)
    agree_on_config(ring_config, deepspeed_config, fault)
    assert model is not None and ring_config is not None
    ring_config.validate_world(dist.get_world_size())
    session = RingSession(
        config=ring_config,
        mesh=RingMesh.from_world(
            ring_config.ring_size,
            ring_config.ulysses_size,
            heartbeat_timeout_s=ring_config.heartbeat_timeout_seconds,
            exit_after_fault_s=ring_config.hop_timeout_seconds,
        ),
        pattern=pattern_from_config(ring_config),
        device=device,
        gradient_divisor=_gradient_divisor(deepspeed_config),
    )
    if _uses_transformers():
        from ds_ring.integrations.transformers import attach

        attach(model, session)
    engine, engine_optimizer, _, scheduler = deepspeed.initialize(
        args=_without_config(args),
        model=model,
        optimizer=optimizer,
        model_parameters=model_parameters,
        lr_scheduler=lr_scheduler,
        distributed_port=distributed_port,
        dist_init_required=dist_init_required,
        collate_fn=collate_fn,
        config=deepspeed_config,
    )
    _equip(engine, session)
    _teach_compile(engine, session)
    guard_checkpoints(engine)
    loader = None if training_data is None else _training_loader(engine, training_data, collate_fn)
    return engine, engine_optimizer, loader, scheduler


def _uses_transformers() -> bool:
    """transformers is optional; a model of it cannot exist without its having been imported."""
    return "transformers" in sys.modules


def _config_source(args: Any, config: Source | None, config_params: Source | None) -> Source:
    """The one DeepSpeed configuration among the three places where deepspeed.initialize takes it from."""
    places = {
        "config": config,
        "config_params": config_params,
        "args.deepspeed_config": getattr(args, "deepspeed_config", None),
    }
    given = {name: value for name, value in places.items() if value is not None}
    if len(given) == 1:
        return next(iter(given.values()))
    got = " and ".join(given) if given else "none"
    raise RingConfigError(
        f"ds_ring.initialize: expected one DeepSpeed configuration, got {got}; pass config=path_or_dict, or"
        " start the script with --deepspeed_config ds_config.json and pass args"
    )


def _without_config(args: Any) -> Any:
    """DeepSpeed refuses a configuration in two places; it gets ours, without the section, as a dict."""
    if getattr(args, "deepspeed_config", None) is None:
        return args
    args = copy.copy(args)
    args.deepspeed_config = None
    return args


def _refuse_model(model: torch.nn.Module | None, ring_config: RingConfig) -> None:
    if model is not None and _uses_transformers():
        from ds_ring.integrations.transformers import check_model

        check_model(model, ring_config)


def _refuse_arguments(model: torch.nn.Module | None, mpu: Any, mesh_param: Any, training_data: Any) -> None:
    if not isinstance(model, torch.nn.Module):
        raise RingConfigError(
            f"model: expected a torch.nn.Module, got {type(model).__name__}; pass model=..."
        )
    if isinstance(model, PipelineModule):
        raise RingConfigError(
            "model: expected a plain module, got a PipelineModule; a ring shards the tokens that a pipeline"
            " would send on, which is not supported: use ZeRO"
        )
    if mesh_param is not None:
        raise RingConfigError(
            f"mesh_param: expected None, got {mesh_param!r}; DeepSpeed then averages gradients over the"
            " data-parallel axis only and the ranks of a ring drift apart: set sequence_parallel_size in the"
            " JSON"
        )
    if mpu is not None:
        raise RingConfigError(
            f"mpu: expected None, got {type(mpu).__name__}; with an mpu the engine's gradient scale differs"
            " between ZeRO stages: set ring_size and ulysses_size in the JSON, ds_ring makes the groups"
        )
    if training_data is not None:
        check_dataset(training_data)


def _refuse_inexact_gradients(config: dict[str, Any]) -> None:
    """Settings under which DeepSpeed 0.19.8 scales gradients unequally, or samples by its own rank."""
    zero = config.get("zero_optimization") or {}
    factor = config.get("gradient_predivide_factor", 1.0)
    if zero.get("stage") == 3 and factor != 1.0:
        raise RingConfigError(
            f"gradient_predivide_factor: expected 1.0 at ZeRO 3, got {factor}; with reduce_scatter off large"
            " gradient buckets are scaled otherwise than small ones: remove the key"
        )
    for key in ("curriculum_learning", "data_efficiency"):
        if (config.get(key) or {}).get("enabled"):
            raise RingConfigError(
                f"{key}: expected it not to be enabled, got {config[key]}; DeepSpeed's sampler then gives"
                " every rank of a ring other samples: order the data set yourself"
            )


def _gradient_divisor(config: dict[str, Any]) -> float:
    """[Note: gradient scale] in loss.py."""
    return 1.0 if config.get("gradient_allreduce_op", "mean") == "sum" else float(dist.get_world_size())


def _init_distributed(distributed_port: int, dist_init_required: bool | None) -> torch.device:
    """Start (or find) the process groups; this rank's device, made current as the engine does later."""
    if get_accelerator().device_name() == "cpu":
        # Not skipped, its just-in-time build takes two minutes and needs ninja; gloo serves without it.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        log.info("deepspeed_shm_comm is not built: gloo carries DeepSpeed's collectives on the CPU")
    deepspeed.init_distributed(
        dist_backend=get_accelerator().communication_backend_name(),
        distributed_port=distributed_port,
        dist_init_required=dist_init_required,
    )
    local_rank = deepspeed.comm.get_local_rank()
    get_accelerator().set_device(local_rank)
    return torch.device(get_accelerator().device_name(local_rank))


def _equip(engine: DeepSpeedEngine, session: RingSession) -> None:
    """Give the engine `engine.ring`, and let each forward find out where its batch lies.

    A hook of the engine, not of the model: `engine.compile` compiles the model, and the search is Python.
    """
    engine.ring = session

    def find_placement(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        session.placements.select(x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor))

    engine.register_forward_pre_hook(find_placement, with_kwargs=True)


def _teach_compile(engine: DeepSpeedEngine, session: RingSession) -> None:
    """Let `engine.compile(backend="ds_ring")` know the session; other backends are as they were."""
    compile_as_before = engine.compile

    @functools.wraps(compile_as_before)
    def compile_with_session(backend: Any = _DEFAULT_BACKEND, *args: Any, **kwargs: Any) -> None:
        if backend == "ds_ring":
            if engine.is_deepcompile_enabled():
                raise RingConfigError(
                    'compile.deepcompile: expected false beside backend="ds_ring", got true: DeepCompile has'
                    " a backend of its own; set it to false"
                )
            from ds_ring.integrations.compile_backend import backend_of

            backend = backend_of(session)
        compile_as_before(backend, *args, **kwargs)

    engine.compile = compile_with_session


def _training_loader(
    engine: DeepSpeedEngine, dataset: Dataset[Any], collate_fn: Callable[..., Any] | None
) -> RingLoader:
    loader = engine.ring.loader(
        dataset,
        engine.train_micro_batch_size_per_gpu(),
        shuffle=True,
        drop_last=engine.dataloader_drop_last(),
        collate_fn=collate_fn,
    )
    loader.on_batch = engine.tput_timer.start  # as DeepSpeed's loader does: the timer covers loading, too
    engine.training_dataloader = loader
    return loader
