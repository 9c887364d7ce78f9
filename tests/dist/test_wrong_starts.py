"""Wrong starts: `ds_ring.initialize` and the first batch with what a run may get wrong, on real ranks.

Each row ends in a typed error on every rank, in under a second from the call; where only some ranks are wrong
the others hear of it, with the rank and the key named. The calls of attention itself are in
test_wrong_inputs.py.
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ds_ring
import ds_ring.models.attention
from tests.dist.deepspeed_ranks import Size, build_batch, build_model, json_config, start_deepspeed
from tests.dist.harness import Failure, RankPool, catch_failure, first_in_time

SIZE = Size(hidden=32, layers=1, tokens=21, samples=2)
SECONDS = 1.0
GOOD = json_config(2, 2, 1)


class Endless(torch.utils.data.IterableDataset):
    def __iter__(self) -> Any:
        while True:
            yield {"input_ids": torch.ones(9, dtype=torch.int64)}


def refused(act: Callable[[], object]) -> Failure:
    torch.distributed.barrier()  # nobody's time has another rank's preparation in it
    return catch_failure(act)


def initialize(config: Any = None, implementation: str = "ds_ring", **arguments: Any) -> Callable[[], Any]:
    """A call of `ds_ring.initialize` with everything ready, so that its time is its own.

    DeepSpeed's own start (imports, its communication backend) is behind us: seconds, once for each process.
    """
    start_deepspeed()
    import ds_ring.engines.deepspeed.initialize

    ds_ring.engines.deepspeed.initialize.init_distributed(29500, None)  # finds the harness's process group
    model = arguments.pop("model") if "model" in arguments else build_model(SIZE, implementation)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1) if model is not None else None
    if "args" not in arguments:
        arguments["config"] = config
    return lambda: ds_ring.initialize(model=model, optimizer=sgd, **arguments)


def answers(pool: RankPool, fn: Callable[..., Any], *args: object) -> list[Any]:
    """What the ranks return: a refusal, or a tuple with one at its head."""

    def in_time(result: list[Any]) -> bool:
        refusals = [item if isinstance(item, Failure) else item[0] for item in result]
        return all(item.seconds < SECONDS for item in refusals)

    return first_in_time(lambda: pool.run(fn, *args, timeout_s=30), in_time)


def check(result: list[Failure], errors: tuple[str, ...], *says: str) -> None:
    for rank, (item, error) in enumerate(zip(result, errors, strict=True)):
        assert item.error == error, (rank, item)
        assert {"RingError", "ValueError"} <= set(item.families)
        for words in says:
            assert re.search(words, item.text), (words, item.text)
        assert item.seconds < SECONDS, (rank, item)


# --- all ranks alike -----------------------------------------------------------------------------


def named_file(path: str) -> types.SimpleNamespace:
    return types.SimpleNamespace(deepspeed_config=path)


def pattern(**keys: Any) -> dict[str, Any]:
    return {"config": GOOD | {"ring_attention": {"pattern": keys}}}


MPU = types.SimpleNamespace(get_sequence_parallel_world_size=lambda: 2)
UNEQUAL_SCALES = {
    "zero_optimization": {"stage": 3, "reduce_scatter": False},
    "gradient_predivide_factor": 2.0,
}
CONFIG = "RingConfigError"
STARTS: dict[str, tuple[dict[str, Any], str, str]] = {
    "no model": ({"model": None, "config": GOOD}, CONFIG, "expected a torch.nn.Module, got NoneType"),
    "no configuration": ({"args": None}, CONFIG, "expected one DeepSpeed configuration, got none"),
    "two configurations": ({"args": named_file("a.json"), "config_params": GOOD}, CONFIG,
        "got config_params and args.deepspeed_config"),
    "missing file": ({"args": named_file("nowhere/a.json")}, CONFIG, "nowhere"),
    "missing file as config": ({"config": "nowhere.json"}, CONFIG, "nowhere.json"),
    "an mpu": ({"mpu": "MPU", "config": GOOD}, CONFIG, "mpu: expected None"),
    "mesh_param": ({"mesh_param": (1, 2), "config": GOOD}, CONFIG, "mesh_param: expected None, got tuple"),
    "world": ({"config": json_config(3, 2, 1)}, "RingMeshError",
        "sequence_parallel_size 3 does not divide world size 2; use 1 or 2"),
    "another attention": (
        {"implementation": "eager", "config": GOOD | {"ring_attention": {"attention": "as_is"}}},
        CONFIG,
        "keeps 'eager', which would attend to this rank's tokens only",
    ),
    "inexact scale": ({"config": GOOD | UNEQUAL_SCALES}, CONFIG,
        "gradient_predivide_factor: expected 1.0 at ZeRO 3, got 2.0"),
    "own sampler": ({"config": GOOD | {"curriculum_learning": {"enabled": True}}}, CONFIG,
        "curriculum_learning"),
    "a stream": ({"training_data": Endless(), "config": GOOD}, CONFIG, "got Endless"),
}  # fmt: skip


def wrong_start(rank: int, world_size: int, what: str) -> Failure:
    arguments = dict(STARTS[what][0])
    if arguments.get("mpu") == "MPU":
        arguments["mpu"] = MPU
    return refused(initialize(**arguments))


@pytest.mark.situation("first hour", "a wrong start")
@pytest.mark.parametrize("what", STARTS)
def test_wrong_starts_are_errors_on_every_rank(rank_pool, what):
    _, error, words = STARTS[what]
    check(answers(rank_pool(2), wrong_start, what), (error, error), words)


# --- ranks that differ -----------------------------------------------------------------------------


def differ(**changes: Any) -> dict[str, Any]:
    return GOOD | changes


TRAILING_COMMA = '{\n  "sequence_parallel_size": 2,\n  "ring_attention": {"ring_size": 2,}\n}'
# What the wrong rank has in place of GOOD; text is written to a file.
DIFFERENT: dict[str, tuple[Any, str]] = {
    "transport": (differ(ring_attention={"transport": "all_gather"}),
        'ring_attention.transport: "ring" on rank 0, "all_gather" on rank {}'),
    "window": (differ(ring_attention={"pattern": {"window": 7}}),
        "ring_attention.pattern.window: null on rank 0, 7 on rank {}"),
    "ring size": (differ(sequence_parallel_size=1), "sequence_parallel_size: 2 on rank 0, 1 on rank {}"),
    "ring size that fits no world": (differ(sequence_parallel_size=3),
        "ring_attention.ring_size: 2 on rank 0, 3 on rank {}"),
    "heartbeat": (differ(ring_attention={"heartbeat_timeout_seconds": 3}),
        "ring_attention.heartbeat_timeout_seconds: 10.0 on rank 0, 3.0 on rank {}"),
    "ZeRO stage": (differ(zero_optimization={"stage": 2, "stage3_param_persistence_threshold": 0}),
        "zero_optimization.stage: 1 on rank 0, 2 on rank {}"),
    "micro batch": (differ(train_micro_batch_size_per_gpu=4),
        "train_micro_batch_size_per_gpu: 2 on rank 0, 4 on rank {}"),
    "a key of DeepSpeed's": (differ(bf16={"enabled": True}),
        "bf16.enabled: no such key on rank 0, true on rank {}"),
}  # fmt: skip
REFUSED = {
    "unknown key": (differ(ring_attention={"ring_sice": 2}), "did you mean 'ring_size'"),
    "trailing comma": (TRAILING_COMMA, "line 3"),
    "missing file": ("", "nowhere.json"),
    "no section": ({key: value for key, value in GOOD.items() if key != "ring_attention"}, "ring_attention"),
}  # fmt: skip


def differing_start(
    rank: int, world_size: int, what: Any, wrong_rank: int, folder: str
) -> tuple[Failure, bool]:
    config: Any = GOOD
    if rank == wrong_rank:
        config = what
        if isinstance(what, str):
            path = Path(folder, "ds_config.json" if what else "nowhere.json")
            if what:
                path.write_text(what)
            config = str(path)
    result = refused(initialize(config))
    afterwards = initialize(GOOD)()[0]  # the same processes can start when the file is mended
    return result, afterwards.ring.mesh.ring_size == 2


@pytest.mark.day("2-1-transport", "2-1-ZeRO stage", "2-1-a key of DeepSpeed's", "2-0-ring size", "4-2-window")
@pytest.mark.situation("first hour", "the JSON differs between ranks")
@pytest.mark.parametrize("what", DIFFERENT)
@pytest.mark.parametrize(("world", "wrong_rank"), [(2, 1), (2, 0), (4, 2)])
def test_configurations_that_differ_name_rank_and_key(rank_pool, tmp_path, what, world, wrong_rank):
    config, words = DIFFERENT[what]
    results = answers(rank_pool(world), differing_start, config, wrong_rank, str(tmp_path))
    if wrong_rank == 0:  # rank 1 is the first that differs from it, with the values the other way round
        words = words.split(":")[0] + ": .* on rank 0, .* on rank 1"
    check([result for result, _ in results], ("RingMismatchError",) * world, words.format(wrong_rank))
    assert all(mended for _, mended in results)


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.parametrize(("world", "wrong_rank"), [(2, 1), (4, 2)])
@pytest.mark.day("2-1-unknown key", "2-1-trailing comma", "2-1-no section", "4-2-missing file")
def test_a_rank_that_cannot_read_its_configuration_stops_all(rank_pool, tmp_path, what, world, wrong_rank):
    config, words = REFUSED[what]
    results = answers(rank_pool(world), differing_start, config, wrong_rank, str(tmp_path))
    errors = tuple(CONFIG if rank == wrong_rank else "RingMismatchError" for rank in range(world))
    check([result for result, _ in results], errors, words)
    for rank, (result, _) in enumerate(results):
        assert rank == wrong_rank or result.text.startswith(f"rank {wrong_rank} refused to start: ")


def test_before_there_is_a_process_group_a_rank_raises_alone():
    """The launcher ends those that wait for it; looking for them would hide the error behind a time-out."""
    assert not torch.distributed.is_initialized()
    with pytest.raises(ds_ring.RingConfigError, match="did you mean 'ring_size'"):
        ds_ring.initialize(model=torch.nn.Linear(2, 2), config={"ring_attention": {"ring_sice": 2}})


def test_an_argument_that_nobody_knows_is_a_type_error():
    with pytest.raises(TypeError, match=r"ds_ring.initialize\(\) got an unexpected .* 'modle'"):
        ds_ring.initialize(model=torch.nn.Linear(2, 2), config=GOOD, modle=1)


def own_paths(rank: int, world_size: int) -> Failure:
    logs = {"tensorboard": {"enabled": False, "output_path": f"host{rank}", "job_name": str(rank)}}
    return refused(initialize(GOOD | logs))


def test_a_host_may_log_where_it_likes(rank_pool):
    assert [result.error for result in rank_pool(2).run(own_paths)] == ["", ""]


# --- the first batch ---------------------------------------------------------------------------------


BATCHES: dict[str, tuple[Callable[[Any], Any], str, str]] = {  # others: tests/unit/data
    "left padding": (lambda batch: batch | {"attention_mask": batch["attention_mask"].flip(1)},
        "RingPatternError", "padding_side"),
    "an empty batch": (lambda batch: {key: value[:0] for key, value in batch.items()}, "RingShapeError",
        r"got \[0, 21\]"),
}  # fmt: skip


def wrong_batch(rank: int, world_size: int, what: str, who: int | None) -> Failure:
    engine = initialize(GOOD)()[0]
    batch = build_batch(SIZE)
    if who is None or rank == who:
        batch = BATCHES[what][0](batch)
    return refused(lambda: engine(**engine.ring.shard_batch(batch)))


@pytest.mark.situation("inputs", "a batch that no pattern can express")
@pytest.mark.parametrize("what", BATCHES)
@pytest.mark.parametrize("who", [None, 1], ids=["all", "rank 1"])
def test_batches_that_no_pattern_can_express(rank_pool, what, who):
    _, error, words = BATCHES[what]
    for rank, result in enumerate(answers(rank_pool(2), wrong_batch, what, who)):
        if who is None or rank == who:
            check([result], (error,), words)
        else:
            check([result], ("RingMismatchError",), "rank 1 refused its batch")


def dropout(rank: int, world_size: int) -> Failure:
    start_deepspeed()
    model = build_model(SIZE, "ds_ring", attention_dropout=0.1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)

    def start_and_train() -> None:
        engine = ds_ring.initialize(model=model, optimizer=sgd, config=GOOD)[0]
        engine(**engine.ring.shard_batch(build_batch(SIZE)))

    return refused(start_and_train)


def test_attention_dropout_of_a_model(rank_pool):
    check(answers(rank_pool(2), dropout), (CONFIG, CONFIG), "dropout")
