"""Every key of the section changes something that can be seen, and `"monitor"` writes real figures.

A key that nothing reads is a promise that is not kept. Each row changes one key and names what must differ then,
on two real ranks, through `ds_ring.initialize`.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from ds_ring.comm.messages import Observers
from ds_ring.config.pattern_section import PATTERNS_BY_KEY
from ds_ring.config.section import RingConfig, by_json_key
from ds_ring.errors import RingConfigError
from ds_ring.ops.options import Options
from tests.dist.deepspeed_ranks import (
    Size,
    build_batch,
    build_latent_model,
    build_model,
    json_config,
    start_deepspeed,
    start_engine,
)
from tests.dist.harness import catch_failure, catch_refusal
from tests.dist.test_ring_use import Own, of_the_session

SIZE = Size(hidden=16, layers=1, tokens=64, samples=2)
DILATED = {"segment_lengths": [8, 16], "dilation_rates": [1, 2]}
CSV = {"csv_monitor": {"enabled": True, "job_name": "ring"}}

# The sections before and after, and the observable that tells them apart. No section: the default, {}.
KEYS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "sequence_parallel_size": ({}, {"sequence_parallel_size": 1}, "grid"),
    "ring_attention.ring_size": ({"ring_size": 2}, {"ring_size": 1, "ulysses_size": 2}, "grid"),
    "ring_attention.ulysses_size": ({}, {"ulysses_size": 2}, "grid"),
    "ring_attention.layout": ({"layout": "zigzag"}, {"layout": "striped"}, "layout"),
    "ring_attention.pattern.causal": ({}, {"pattern": {"causal": False}}, "output"),
    "ring_attention.pattern.window": ({}, {"pattern": {"window": 7}}, "output"),
    "ring_attention.pattern.window_dilation": ({"pattern": {"window": 7}},
        {"pattern": {"window": 7, "window_dilation": 2}}, "output"),
    "ring_attention.pattern.sinks": ({"pattern": {"window": 7}}, {"pattern": {"window": 7, "sinks": 2}},
        "output"),
    **{f"ring_attention.pattern.{key}": ({}, {"pattern": {key: 9}}, "output") for key in PATTERNS_BY_KEY},
    "ring_attention.pattern.slices": ({},
        {"pattern": {"slices": [[[0, 40], [0, 40], "causal"], [[40, 64], [0, 64], "causal"]]}}, "output"),
    "ring_attention.pattern.mask_mod": ({}, {"pattern": {"mask_mod": "tests.masks:every_third"}}, "output"),
    "ring_attention.pattern.segment_lengths": ({"pattern": DILATED},
        {"pattern": DILATED | {"segment_lengths": [8, 32]}}, "output"),
    "ring_attention.pattern.dilation_rates": ({"pattern": DILATED},
        {"pattern": DILATED | {"dilation_rates": [1, 4]}}, "output"),
    "ring_attention.pattern.head_offsets": ({"pattern": DILATED},
        {"pattern": DILATED | {"head_offsets": "zero"}}, "output"),
    "ring_attention.pattern.documents": ({}, {"pattern": {"documents": True}}, "takes documents"),
    "ring_attention.pattern.layers": ({}, {"pattern": {"layers": {"1": {"window": 7}}}}, "layer 1"),
    "ring_attention.attention": ({}, {"attention": "as_is"}, "attn_implementation"),
    "ring_attention.kernel": ({}, {"kernel": "reference"}, "kernel"),
    "ring_attention.block_size": ({"kernel": "flex"}, {"kernel": "flex", "block_size": 64}, "kernel on CUDA"),
    "ring_attention.kernel_options": ({}, {"kernel_options": {"block": 1024}}, "kernel"),
    "ring_attention.transport": ({}, {"transport": "all_gather"}, "batches"),
    "ring_attention.overlap": ({}, {"overlap": False}, "waits"),
    "ring_attention.prune": ({"layout": "contiguous", "pattern": {"window": 7}},
        {"layout": "contiguous", "pattern": {"window": 7}, "prune": False}, "bytes"),
    "ring_attention.gradient_payload": ({}, {"gradient_payload": "bfloat16"}, "gradient payload"),
    "ring_attention.chunk_bytes": ({}, {"chunk_bytes": 1}, "batches"),
    "ring_attention.stage_bytes": ({}, {"stage_bytes": 1 << 30}, "directions"),
    "ring_attention.latents": ({"latents": False}, {"latents": True}, "latents"),
    "ring_attention.min_sequence_length": ({}, {"min_sequence_length": 65}, "layout"),
    "ring_attention.dynamic_ring": ({}, {"dynamic_ring": True}, "rings"),
    "ring_attention.heartbeat_timeout_seconds": ({}, {"heartbeat_timeout_seconds": 9}, "heartbeat"),
    "ring_attention.hop_timeout_seconds": ({}, {"hop_timeout_seconds": 61}, "hop deadline"),
    "ring_attention.first_pass_timeout_seconds": ({}, {"first_pass_timeout_seconds": 601}, "first deadline"),
    "ring_attention.step_timeout_seconds": ({}, {"step_timeout_seconds": 601}, "late ranks"),
    "ring_attention.checkpoint_timeout_seconds": ({}, {"checkpoint_timeout_seconds": 1801}, "late ranks"),
    "ring_attention.start_timeout_seconds": ({}, {"start_timeout_seconds": 1801}, "late ranks"),
    "ring_attention.recompute_attention": ({}, {"recompute_attention": True}, "recompute"),
    "ring_attention.long_sequence.tiled_loss": ({}, {"long_sequence": {"tiled_loss": True}}, "long"),
    "ring_attention.long_sequence.tiled_mlp": ({}, {"long_sequence": {"tiled_mlp": True}}, "long"),
    "ring_attention.long_sequence.offload_checkpoints": ({}, {"long_sequence": {"offload_checkpoints": True}},
        "long"),
    "ring_attention.long_sequence.offload_attention": ({}, {"long_sequence": {"offload_attention": True}},
        "offload"),
    "ring_attention.check_finite": ({}, {"check_finite": True}, "NaN"),
    "ring_attention.verify_first_batch": ({}, {"verify_first_batch": True}, "forward"),
    "ring_attention.check_modules": ({}, {"check_modules": False}, "watch"),
    "ring_attention.monitor": (CSV, CSV | {"monitor": True}, "traces"),
}  # fmt: skip


def test_the_table_has_every_key() -> None:
    assert sorted(KEYS) == sorted(by_json_key(RingConfig(ring_size=2)))


def start(section: dict[str, Any], model: torch.nn.Module) -> Any:
    start_deepspeed()
    import ds_ring

    section = dict(section)
    extra = {key: section.pop(key) for key in ("sequence_parallel_size", "csv_monitor") if key in section}
    config = json_config(2, 2, 0, ring_attention=section, **extra)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1) if "verify_first_batch" in section else None
    return ds_ring.initialize(model=model, optimizer=sgd, config=config)[0]


def observe(section: dict[str, Any], name: str, folder: str, defaults: dict[bool, Any]) -> str:
    """One observable of an engine with this section, as text; `defaults` keeps the engine without one."""
    if "csv_monitor" in section:
        section = section | {"csv_monitor": section["csv_monitor"] | {"output_path": folder}}
    if name == "attn_implementation":
        return str(start(section, build_model(SIZE, "sdpa")).module.config._attn_implementation)
    if name == "latents":
        layer = start(section, build_latent_model(SIZE)).module.model.layers[0].self_attn
        return type(layer.expand_kv).__name__
    if name == "long":
        return in_the_model(start(section, build_model(SIZE, "sdpa")).module)
    if name == "watch":
        return str("module_watch" in start(section, build_model(SIZE, "sdpa")).ring.describe())
    if name == "rings":
        return str(start(section, build_model(SIZE, "sdpa")).ring.dynamic.rings is not None)
    engine = defaults.get(name != "NaN" and not section) or start(section, Own(of_the_session))
    if not section and name != "NaN":
        defaults[True] = engine  # the same for all rows that begin with it
    model, session = engine.module, engine.ring
    model.session = session
    batch = {"input_ids": build_batch(SIZE)["input_ids"]}
    with_documents = batch | {"document_ids": torch.arange(SIZE.tokens).expand(2, -1) // 20}
    if name == "takes documents":
        return catch_refusal(session.shard_batch, with_documents)
    local = session.shard_batch(batch)
    if name == "layer 1":
        return str(session.attention(layer=1).contexts[0][0].pattern)
    if name == "kernel on CUDA":
        return describe(kernel_on_cuda(Options.make(session.config)))
    if name == "NaN":
        torch.nn.init.constant_(model.embed.weight, float("nan"))
        return catch_refusal(engine, **local)
    from ds_ring.comm import exchange

    waited, wait = [0], exchange.Pending.wait
    (context, _), *_ = session.attention().contexts
    counters = exchange.Counters() if context.exchange is None else context.exchange.counters
    counters.batches = counters.bytes_sent = 0

    def counting(pending: Any) -> None:
        waited[0] += 1
        wait(pending)

    with mock.patch.object(exchange.Pending, "wait", counting), torch.no_grad():
        output = engine(**local)
    observables = {
        "grid": lambda: session.run_mesh.grid,
        "layout": lambda: (session.layout, session.batches.current.mesh.sequence_size),
        "output": lambda: session.gather(output).double().sum().item(),
        "kernel": lambda: describe(context.choose_kernel(output)),
        "batches": lambda: counters.batches,
        "bytes": lambda: counters.bytes_sent,
        "waits": lambda: waited[0],
        "directions": lambda: [entry.plan.classes[0].directions for entry in context.prepared.values()],
        "gradient payload": lambda: context.options.gradient_payload,
        "recompute": lambda: float(context.options.recompute_attention),
        "offload": lambda: context.options.offload_attention,
        "heartbeat": lambda: session.run_mesh.detector.heartbeat_timeout_s,
        "hop deadline": lambda: context.exchange and context.exchange.hop_timeout_s,
        "first deadline": lambda: context.options.first_pass_timeout_seconds,
        "late ranks": lambda: session.run_mesh.timeouts,
        "traces": lambda: len(session.run_mesh.owners[Observers]),
        "forward": lambda: wrappers_of(engine.forward),
    }
    return str(observables[name]())


def in_the_model(model: Any) -> str:
    """Whose the head and the MLPs are, and whether layers are checkpointed."""
    parts = (model.lm_head, model.model.layers[0].mlp)
    return f"{[part.forward.__qualname__ for part in parts]} {model.is_activation_checkpointing}"


def wrappers_of(function: Any) -> list[str]:
    """What stands around a method, the outermost first."""
    inner = getattr(function, "__wrapped__", None)
    return [function.__code__.co_qualname, *(wrappers_of(inner) if inner else [])]


def kernel_on_cuda(options: Any) -> Any:
    from ds_ring.kernels.select import get_kernel

    return get_kernel(options.kernel, "cuda", options.kernel_pairs, options.block_size)


def describe(kernel: Any) -> str:
    return f"{type(kernel).__name__} {values_of(kernel)}"


def values_of(thing: Any) -> Any:
    """Its numbers, and those of what it holds."""
    if isinstance(thing, (int, float, str, tuple)) or not hasattr(thing, "__dict__"):
        return thing if isinstance(thing, (int, float, str, tuple)) else ""
    return sorted((name, str(values_of(value))) for name, value in vars(thing).items())


def all_keys(rank: int, world_size: int, folder: str) -> dict[str, tuple[str, str]]:
    defaults: dict[bool, Any] = {}
    return {
        key: (observe(before, name, folder, defaults), observe(after, name, folder, defaults))
        for key, (before, after, name) in KEYS.items()
    }


@pytest.mark.night
def test_every_key_changes_what_can_be_seen(rank_pool: Any, tmp_path: Path) -> None:
    sections = {key: (before, after) for key, (before, after, _) in KEYS.items()}
    for result in rank_pool(2).run(all_keys, str(tmp_path), timeout_s=240):
        for key, (before, after) in result.items():
            assert before != after, f"{key}: {KEYS[key][2]} is {before} with {sections[key]}"


# --- the monitor -------------------------------------------------------------------------------------

EVENTS = [
    "forward_hop_seconds", "backward_hop_seconds", "wait_share", "exposed_seconds", "sent_bytes",
    "buffers_bytes", "memory_bytes", "step_seconds", "tokens_per_second",
]  # fmt: skip


def train_monitored(rank: int, world_size: int, folder: str) -> int:
    """Two steps of two micro-batches with an evaluation between; the bytes of K/V and their gradients."""
    model = build_model(SIZE, "sdpa")
    monitor = {"csv_monitor": {"enabled": True, "output_path": folder, "job_name": "ring"}}
    section = {"monitor": True, "layout": "zigzag", "prune": False}
    engine = start_engine(
        model, json_config(2, 2, 1, gradient_accumulation_steps=2, ring_attention=section, **monitor)
    )
    batch = engine.ring.shard_batch(build_batch(SIZE))
    for _ in range(2):
        for _ in range(2):
            engine.backward(engine(**batch).loss)
            engine.step()
        engine.eval()
        with torch.no_grad():
            engine(**batch)
        engine.train()
    head_dim, kv_heads, local = SIZE.hidden // 4, 2, SIZE.tokens // 2
    unit = (
        4 * SIZE.samples * kv_heads * local * head_dim
    )  # of K; each micro-batch sends K and V, twice, and dK, dV
    assert (
        len(engine.ring.run_mesh.owners[Observers]) == 1
        and not engine.ring.run_mesh.owners[Observers][0].spans
    )
    return 2 * 6 * unit


def test_the_monitor_gets_real_figures(rank_pool: Any, tmp_path: Path) -> None:
    sent = rank_pool(2).run(train_monitored, str(tmp_path))[0]
    written = {}
    for event in EVENTS:
        with (tmp_path / "ring" / f"Ring_{event}.csv").open() as file:
            (_, header), *rows = csv.reader(file)
        assert header == event
        # one row for each optimizer step; how long the first one took is not known
        assert len(rows) == 2 - (event in ("step_seconds", "tokens_per_second")), event
        values = written[event] = [float(value) for _, value in rows]
        assert all(value > 0 for value in values), (event, values)
        if event == "sent_bytes":
            assert values == [sent, sent]
        elif event == "wait_share":
            assert max(values) < 1
        elif event == "memory_bytes":
            assert 1 << 26 < min(values) <= max(values) < 1 << 36
    (seconds,), (rate,) = written["step_seconds"], written["tokens_per_second"]
    assert written["exposed_seconds"][1] < seconds
    assert rate * seconds == pytest.approx(2 * SIZE.samples * SIZE.tokens)  # of two micro-batches


def tokens_of_a_ulysses_rank(rank: int, world_size: int) -> float:
    from ds_ring.measure.step_metrics import count_tokens

    model = build_model(SIZE, "sdpa")
    engine = start_engine(model, json_config(2, 2, 0, ring_attention={"ulysses_size": 2}))
    batch = engine.ring.shard_batch(build_batch(SIZE))
    return count_tokens(tuple(batch.values()), engine.ring)


def test_tokens_are_counted_once_where_ranks_split_the_heads(rank_pool: Any) -> None:
    counted = rank_pool(2).run(tokens_of_a_ulysses_rank)
    assert counted == [SIZE.samples * SIZE.tokens / 2] * 2


def start_monitored(rank: int, world_size: int) -> str:
    return catch_failure(start, {"monitor": True}, Own(of_the_session)).text


def test_a_monitor_that_writes_nowhere_is_refused(rank_pool: Any) -> None:
    for text in rank_pool(2).run(start_monitored):
        assert "expected one of tensorboard, csv_monitor, wandb, comet, got none" in text


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"transport": "all_gather", "overlap": False}, "overlap: .*got false beside .*all_gather"),
        ({"transport": "all_gather", "prune": False}, "prune: .*has no hops; leave it out"),
        ({"transport": "all_gather", "chunk_bytes": 64}, "chunk_bytes"),
        ({"transport": "reproducible", "stage_bytes": 64}, "stage_bytes: .*passes nothing on"),
        ({"transport": "all_gather", "gradient_payload": "bfloat16"}, "gradient_payload: .*has no hops"),
        ({"transport": "all_gather", "monitor": True}, "monitor"),
        ({"kernel": "cpu", "block_size": 64}, 'block_size: .*"kernel": "cpu", which has no mask blocks'),
        ({"pattern": {"head_offsets": "zero"}}, "pattern.head_offsets: .*it has no effect"),
    ],
)
def test_keys_without_an_effect_are_refused_by_name(section: dict[str, Any], words: str) -> None:
    with pytest.raises(RingConfigError, match=words):
        RingConfig.from_deepspeed({"sequence_parallel_size": 2, "ring_attention": section})
