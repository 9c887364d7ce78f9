"""Compare planned and measured peak memory, and bytes sent, of small runs on this machine.

Each point runs on real gloo ranks under the profiler, whose allocation events are summed up: attention alone,
forward + backward, or whole DeepSpeed training of a small Llama (two steps, from before the model is built).

The profiler does not see what gloo's threads free. A tensor whose last owner is a collective that has just
ended counts as alive for ever; so waits are a little longer here, until gloo has let go.

Example:
    python tools/check_plan.py                       # all 38 points, ten to twenty minutes
    python tools/check_plan.py --only zero3 --json
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from common import ONLY, choose, llama, make_engine, make_parser, make_zero_section, print_row
from tqdm import tqdm

from ds_ring import Causal, Dilated, RingMesh, SlidingWindow, build_plan, make_layout
from ds_ring.masks.pattern import Pattern
from ds_ring.measure.memory import measure_cpu_memory
from ds_ring.ops.context import make_ring_context
from ds_ring.ops.options import Options
from ds_ring.ops.ring_op import ring_attention_op
from ds_ring.ring.pool import Buffers
from ds_ring.schedule.lowering import chunk_bytes_on
from ds_ring_launcher.plan.estimate import estimate
from ds_ring_launcher.plan.hardware import read_hardware
from ds_ring_launcher.plan.model_file import ModelShape
from ds_ring_launcher.plan.model_memory import Zero, attention_alone
from ds_ring_launcher.plan.pass_memory import PassShape, pass_memory
from ds_ring_launcher.plan.pass_time import CostPart, bytes_sent
from ds_ring_launcher.plan.training_setting import ELEMENT_BYTES, TrainingSetting
from ds_ring_launcher.run.local_ranks import run_ranks

HEAD_DIM = 64
PATTERNS: dict[str, tuple[Pattern, dict[str, Any]]] = {
    "causal": (Causal(), {}),
    "window": (SlidingWindow(1024), {"window": 1024}),
    "longnet": (
        Dilated((1024, 2048, 4096, 8192), (1, 2, 4, 8), causal=True),
        {"segment_lengths": [1024, 2048, 4096, 8192], "dilation_rates": [1, 2, 4, 8]},
    ),
}


class CheckedSetting(NamedTuple):
    """Describe one run; `model` and `stage` are those of training, None is attention alone."""

    ranks: int
    tokens: int
    heads: int
    kv_heads: int
    dtype: str
    pattern: str
    stage: int | None = None
    model: ModelShape | None = None
    checkpointing: bool = False
    long: tuple[str, ...] = ()  # keys of "long_sequence" that are on
    recompute: bool = False  # attention, under checkpointing
    # the engine's start alone, at stage 3: "whole" or "partitioned" (`deepspeed.zero.Init`) as it is made
    start: str | None = None
    sub_group: int | None = None  # sub_group_size of stage 3
    fused: bool = False  # an optimizer without temporaries, as on GPUs
    steps: int = 1  # micro-batches of a step
    offload: bool = False  # the optimizer

    @property
    def name(self) -> str:
        what = "attention" if self.stage is None else f"zero{self.stage}"
        what += "" if self.start is None else f" start {self.start}"
        options = ", checkpointing" if self.checkpointing else ""
        options += "".join(f", {key}" for key in self.long) + (", recompute" if self.recompute else "")
        options += ", offload" if self.offload else ""
        options += ", sub-groups" if self.sub_group else ""
        options += (", fused" if self.fused else "") + (
            f", {self.steps} micro-batches" if self.steps > 1 else ""
        )
        heads = f"H{self.heads} G{self.kv_heads}"
        return f"{what} P={self.ranks} T={self.tokens} {heads} {self.dtype} {self.pattern}{options}"


class PeakAndTraffic(NamedTuple):
    """Bytes: the peak and what the busiest rank sent (0 where that was not counted)."""

    peak: int
    sent: int


WIDE = ModelShape(6, 256, 4, 2, HEAD_DIM, 768, 4096)  # activations and logits dominate
DEEP = ModelShape(6, 512, 8, 4, HEAD_DIM, 1536, 2048)  # states dominate
LONG = ModelShape(3, 128, 2, 1, HEAD_DIM, 512, 16000)  # logits would dominate
EVERY = ("tiled_loss", "tiled_mlp", "offload_checkpoints")
TILES = {"tiled_loss": 256, "tiled_mlp": 512}  # tokens


def _training(
    stage: int, dtype: str, model: ModelShape, tokens: int, pattern: str = "causal"
) -> CheckedSetting:
    return CheckedSetting(2, tokens, model.heads, model.kv_heads, dtype, pattern, stage, model)


POINTS = [
    CheckedSetting(1, 8192, 8, 8, "float32", "causal"),
    CheckedSetting(1, 8192, 8, 2, "bfloat16", "window"),
    CheckedSetting(2, 8192, 8, 8, "float32", "causal"),
    CheckedSetting(2, 8192, 8, 2, "bfloat16", "causal"),
    CheckedSetting(2, 8192, 8, 4, "float32", "window"),
    CheckedSetting(2, 16384, 4, 4, "float32", "longnet"),
    CheckedSetting(4, 8192, 16, 16, "float32", "causal"),
    CheckedSetting(4, 8192, 16, 8, "bfloat16", "causal"),
    CheckedSetting(4, 16384, 8, 8, "bfloat16", "longnet"),
    _training(0, "float32", WIDE, 2048),
    _training(1, "float32", WIDE, 2048),
    _training(2, "float32", WIDE, 2048, "window"),
    _training(3, "float32", WIDE, 2048),
    _training(0, "bfloat16", WIDE, 2048),
    _training(1, "bfloat16", WIDE, 4096, "longnet"),
    _training(3, "bfloat16", WIDE, 2048),
    _training(0, "float32", DEEP, 256),
    _training(1, "float32", DEEP, 256),
    _training(2, "bfloat16", DEEP, 256),
    _training(3, "float32", DEEP, 256),
    _training(1, "float32", WIDE, 4096)._replace(checkpointing=True),
    # options of long sequences: a vocabulary and a length at which tiles are smaller than the shard
    _training(1, "float32", LONG, 4096, "window")._replace(long=("tiled_loss",)),
    _training(1, "float32", LONG, 4096, "window")._replace(long=("tiled_loss", "tiled_mlp")),
    _training(1, "float32", LONG, 4096, "window")._replace(long=EVERY, checkpointing=True),
    _training(3, "bfloat16", LONG, 4096, "window")._replace(long=EVERY, checkpointing=True),
    _training(1, "float32", LONG, 4096, "window")._replace(long=EVERY, checkpointing=True, recompute=True),
    # the optimizer's step is the highest moment
    _training(3, "bfloat16", DEEP, 64)._replace(sub_group=6_000_000),
    _training(1, "bfloat16", DEEP, 64)._replace(fused=True),
    _training(2, "float32", DEEP, 64)._replace(fused=True),
    # gradients of earlier micro-batches are there at the loss
    _training(0, "bfloat16", WIDE, 4096)._replace(steps=2),
    _training(1, "bfloat16", WIDE, 4096)._replace(steps=2),
    _training(2, "bfloat16", WIDE, 4096)._replace(steps=2),
    _training(1, "bfloat16", DEEP, 64)._replace(fused=True, offload=True),
    _training(2, "bfloat16", DEEP, 64)._replace(fused=True, offload=True, steps=2),
    *(
        _training(3, dtype, DEEP, 256)._replace(start=start, ranks=ranks)
        for dtype, start, ranks in (
            ("float32", "whole", 2), ("float32", "partitioned", 4), ("bfloat16", "partitioned", 2),
            ("bfloat16", "partitioned", 4),
        )
    ),
]  # fmt: skip


def get_bucket(point: CheckedSetting) -> int:
    """Return a reduce_bucket_size that holds every parameter; DeepSpeed's default is more than these have."""
    assert point.model is not None
    return point.model.largest_parameter


def planned(point: CheckedSetting) -> PeakAndTraffic:
    """Return the cost model's plan for the rank that needs most."""
    pattern, element = PATTERNS[point.pattern][0], ELEMENT_BYTES[point.dtype]
    if point.model is not None and point.stage is not None:
        zero = Zero(
            point.stage,
            point.ranks,
            element,
            get_bucket(point),
            point.stage == 3,
            fused_adam=point.fused,
            accumulates=point.steps > 1,
            offload_optimizer=point.offload,
        )
        if point.sub_group is not None:
            zero = replace(zero, sub_group_elements=point.sub_group)
        cpu = read_hardware("cpu")
        setting = TrainingSetting(
            point.tokens, point.ranks, 1, point.model, pattern, "auto", zero, point.dtype, cpu,
            checkpointing=point.checkpointing, recompute_attention=point.recompute,
            loss_tokens=TILES["tiled_loss"] if "tiled_loss" in point.long else None,
            mlp_tokens=TILES["tiled_mlp"] if "tiled_mlp" in point.long else None,
            offload_checkpoints="offload_checkpoints" in point.long,
        )  # fmt: skip
        if point.start is not None:
            is_partitioned = point.start == "partitioned"
            return PeakAndTraffic(replace(zero, partitioned_init=is_partitioned).start(point.model), 0)
        return PeakAndTraffic(estimate(setting).peak.total, 0)
    layout = make_layout("auto", tokens=point.tokens, ring_size=point.ranks, pattern=pattern)
    plan = build_plan(pattern, layout, query_heads=point.heads, kv_heads=point.kv_heads)
    local, group = layout.local_tokens, point.heads // point.kv_heads
    chunk_bytes = chunk_bytes_on("cpu", point.ranks)
    shape = PassShape(1, group, local, HEAD_DIM, element, chunk_bytes, "cpu")
    ranks = []
    for rank in range(point.ranks):
        classes = plan.rank(rank).classes
        moment = attention_alone(
            point.heads, point.kv_heads, local, HEAD_DIM, element, pass_memory(classes, shape, first=True)
        )
        ranks.append(
            PeakAndTraffic(
                moment.total, sum(bytes_sent([CostPart(head_class, 1) for head_class in classes], shape))
            )
        )
    return PeakAndTraffic(*map(max, zip(*ranks, strict=True)))


def attention_rank(point: CheckedSetting) -> PeakAndTraffic:
    """Run one rank of a pass, in a process group that is there."""
    pattern, dtype = PATTERNS[point.pattern][0], getattr(torch, point.dtype)
    mesh = RingMesh.from_world(point.ranks)
    layout = make_layout("auto", tokens=point.tokens, ring_size=point.ranks, pattern=pattern)
    context = make_ring_context(pattern, layout, mesh, Options())
    with measure_cpu_memory() as memory:
        query, key = ((1, heads, layout.local_tokens, HEAD_DIM) for heads in (point.heads, point.kv_heads))
        q, k, v = (torch.randn(shape).to(dtype).requires_grad_() for shape in (query, key, key))
        out, _ = ring_attention_op(q, k, v, context.handle)
        out.backward(torch.randn_like(out))
    sent = 0 if context.exchange is None else context.exchange.counters.bytes_sent
    mesh.owners[Buffers].release()
    return PeakAndTraffic(memory.peak_bytes, sent)


def training_rank(point: CheckedSetting) -> PeakAndTraffic:
    """Run one rank of training: build the model, make two steps."""
    import ds_ring.models.attention  # noqa: F401  registers attn_implementation="ds_ring"

    shape = point.model
    assert shape is not None
    sizes = (shape.vocab, shape.hidden, shape.intermediate, shape.layers, shape.heads, shape.kv_heads)
    ids = torch.randint(1, shape.vocab, (1, point.tokens), generator=torch.Generator().manual_seed(0))
    zero = make_zero_section(point.stage, get_bucket(point))
    if point.sub_group is not None:
        zero["sub_group_size"] = point.sub_group
    section = {
        "pattern": PATTERNS[point.pattern][1],
        "long_sequence": {key: TILES.get(key, True) for key in point.long},
        "recompute_attention": point.recompute,
    }
    if point.offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    low: dict[str, Any] = {"bf16": {"enabled": True}} if point.dtype == "bfloat16" else {}
    adam = {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True, "fused": point.fused}}
    keys = low | {"optimizer": adam, "gradient_accumulation_steps": point.steps}
    keys["zero_force_ds_cpu_optimizer"] = False
    with patient_waits(), measure_cpu_memory() as memory:
        with partitioned_init(point, zero, low):
            model = llama(point.tokens, *sizes, attention="ds_ring", head_dim=shape.head_dim)
        if point.checkpointing:
            model.gradient_checkpointing_enable()
        engine = make_engine(model, point.ranks, section, zero, **keys)
        for _ in range(0 if point.start is not None else 2 * point.steps):
            loss = engine(**engine.ring.shard_batch({"input_ids": ids, "labels": ids.clone()})).loss
            engine.backward(loss)
            engine.step()
    return PeakAndTraffic(memory.peak_bytes, 0)


def partitioned_init(point: CheckedSetting, zero: dict[str, Any], low: dict[str, Any]) -> Any:
    """Return the context in which DeepSpeed divides every module as it is made, where a point asks for it."""
    if point.start != "partitioned":
        return nullcontext()
    import deepspeed

    from ds_ring.engines.deepspeed.initialize import leave_shm_out

    leave_shm_out()
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero} | low
    return deepspeed.zero.Init(config_dict_or_path=config)


@contextmanager
def patient_waits(seconds: float = 0.005) -> Iterator[None]:
    """Give gloo's thread time to let go after each wait: tensors are then freed by the thread that waited."""
    from torch._C._distributed_c10d import Work

    wait = Work.wait

    def patiently(*args: Any, **kwargs: Any) -> Any:
        result = wait(*args, **kwargs)
        time.sleep(seconds)
        return result

    setattr(Work, "wait", patiently)  # noqa: B010  # mypy has it that methods stay
    try:
        yield
    finally:
        setattr(Work, "wait", wait)  # noqa: B010


def measure_rank(point: CheckedSetting) -> PeakAndTraffic:
    """Run one rank, of whichever kind."""
    return attention_rank(point) if point.stage is None else training_rank(point)


def measured(point: CheckedSetting) -> PeakAndTraffic:
    """Measure the most of any rank of a real run.

    Raises:
        RanksError: a rank failed, or they took longer than five minutes.
    """
    ranks = run_ranks(measure_rank, point.ranks, (point,), threads=1, deadline_s=300.0)
    return PeakAndTraffic(*map(max, zip(*ranks, strict=True)))


def main(arguments: list[str] | None = None) -> int:
    """Print a row for each point; exit status 1 if a peak is off by more than 5 %, or bytes differ."""
    parser = make_parser(__doc__, only=ONLY, json=(False, "one JSON row per line"))
    options = parser.parse_args(arguments)
    os.environ["DS_ACCELERATOR"] = "cpu"
    names = choose(options.only, [point.name for point in POINTS])
    points = [point for point in POINTS if point.name in names]
    good = 0
    for point in tqdm(points, desc="points", disable=None):
        plan, real = planned(point), measured(point)
        off = plan.peak / real.peak - 1
        good += abs(off) <= 0.05 and (point.stage is not None or plan.sent == real.sent)
        row = {"point": point.name, "planned_mib": round(plan.peak / 2**20, 1)}
        row |= {"measured_mib": round(real.peak / 2**20, 1), "off_percent": round(100 * off, 1)}
        if point.stage is None:
            row |= {"planned_bytes": plan.sent, "sent_bytes": real.sent}
        print_row(row, options.json)
    print_row({"points": len(points), "within_5_percent": good})
    return 0 if good == len(points) else 1


if __name__ == "__main__":
    sys.exit(main())
