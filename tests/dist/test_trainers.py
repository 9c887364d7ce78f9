"""Trainer, Accelerate, TRL and DeepSpeed's tutorial on a ring: the example scripts, against one process without a ring.

The plain script is the example without its two lines for the ring, run by one process; the numbers that it prints
(losses, evaluations, gradient norms, learning rates, tokens, accuracies) are compared one by one.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import multiprocessing
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_ring.registry import load
from tests.dist.deepspeed_ranks import Size, build_batch, build_model, json_config, start_deepspeed

EXAMPLES = Path(__file__).resolve().parents[2] / "tools/examples"
RING_KEYS = ("sequence_parallel_size", "ring_attention")

Entries = list[dict[str, Any]]


def plain_script(name: str) -> str:
    """The example without what makes it a ring."""
    lines = (EXAMPLES / name).read_text().splitlines()
    added = [line for line in lines if line.startswith(("import ds_ring", "ds_ring."))]
    assert len(added) + len(RING_KEYS) <= 5, added
    return "\n".join(line for line in lines if line not in added)


def run_example(rank: int, world_size: int, name: str, arguments: list[str], plain: bool) -> Entries:
    """What the script prints on this rank, without times."""
    deepspeed = start_deepspeed()
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # two minutes of compiling
    from accelerate.state import AcceleratorState, GradientState
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    unset_hf_deepspeed_config()
    multiprocessing.current_process()._config["daemon"] = False  # DeepSpeed's loader starts workers
    sys.path.insert(0, str(EXAMPLES))
    sys.argv = [name, *arguments]
    source = plain_script(name) if plain else (EXAMPLES / name).read_text()
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(source, str(EXAMPLES / name), "exec"), {"__name__": "__main__"})
    found = [ast.literal_eval(line) for line in printed.getvalue().splitlines() if line.startswith("{")]
    # Not Trainer's own lines, whose numbers are strings. train_loss is a mean since the start or resumption.
    found = [entry for entry in found if not any(isinstance(value, str) for value in entry.values())]
    for entry in found:
        if entry.pop("train_loss", None) is not None:
            entry["samples of a step"] = round(
                entry["train_samples_per_second"] / entry["train_steps_per_second"]
            )
    timed = ("runtime", "per_second", "total_flos")
    return [{key: value for key, value in entry.items() if not key.endswith(timed)} for entry in found]


def check_entries(got: Entries, expected: Entries) -> None:
    assert len(expected) >= 6
    assert len(got) == len(expected)
    for one, other in zip(got, expected, strict=True):
        assert one.keys() == other.keys()
        for key, value in other.items():
            assert one[key] == pytest.approx(value, rel=2e-5), f"{key} in {one}, expected {other}"


def plain_config(folder: Path, config: dict[str, Any]) -> str:
    path = folder / "plain.json"
    path.write_text(json.dumps({key: value for key, value in config.items() if key not in RING_KEYS}))
    return str(path)


# Where a script leaves what it resumes from, and how many of its entries come before that.
SCRIPTS = {
    "hf_trainer.py": ("checkpoint-3", 0),
    "trl_sft.py": ("checkpoint-2", 0),
    "accelerate_loop.py": ("", 4),
    "deepspeed_loop.py": ("", 4),
}


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.day("hf_trainer.py")
def test_a_script_trains_and_resumes_as_on_one_process(rank_pool: Any, tmp_path: Path, script: str) -> None:
    pytest.importorskip("trl" if "trl" in script else "accelerate")
    ring_json = EXAMPLES / "ds_config.json"
    plain_json = plain_config(tmp_path, json.loads(ring_json.read_text()))
    plain = ["--config", plain_json, "--output", str(tmp_path / "plain")]
    expected = rank_pool(1).run(run_example, script, plain, True)[0]
    ring = ["--config", str(ring_json), "--output", str(tmp_path / "ring")]
    got = rank_pool(2).run(run_example, script, ring, False)[0]
    check_entries(got, expected)
    checkpoint, before = SCRIPTS[script]
    ring[-1] = str(tmp_path / "resumed")
    resume = [*ring, "--resume", str(tmp_path / "ring" / checkpoint)]
    resumed = got[:before] + rank_pool(2).run(run_example, script, resume, False)[0]
    for entry in [*resumed, *expected]:
        for key in ("num_tokens", "eval_num_tokens"):  # of TRL, which counts from 0 again
            entry.pop(key, None)
    check_entries(resumed, expected)


@pytest.mark.slow
@pytest.mark.parametrize("script", ["hf_trainer.py", "accelerate_loop.py"])
@pytest.mark.day("accelerate_loop.py")
def test_replicas_of_a_ring_see_other_samples(rank_pool: Any, tmp_path: Path, script: str) -> None:
    """Ring 2 x data 2 at ZeRO 3: one sample a replica is two on one process; evaluation fills up its last batch."""
    pytest.importorskip("accelerate")
    config = json.loads((EXAMPLES / "ds_config.json").read_text()) | {"zero_optimization": {"stage": 3}}
    config |= {"sequence_parallel_size": "auto", "ring_attention": {"ring_size": 2, "layout": "auto"}}
    ring_json = tmp_path / "ring.json"
    ring_json.write_text(json.dumps(config))
    plain = ["--config", plain_config(tmp_path, config), "--output", str(tmp_path / "plain")]
    expected = rank_pool(1).run(run_example, script, plain, True)[0]
    ring = ["--config", str(ring_json), "--output", str(tmp_path / "ring"), "--batch_size", "1"]
    got = rank_pool(4).run(run_example, script, ring, False)[0]
    # An evaluation's loss is a mean over batches, and those of one process are others.
    for entries in (got, expected):
        for entry in entries:
            entry.pop("eval_loss", None), entry.pop("held out", None)
    check_entries(got, expected)


def ids_of_a_shuffling_loader(rank: int, world_size: int) -> list[int]:
    import ds_ring

    start_deepspeed()
    ds_ring.enable()
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    torch.manual_seed(rank)
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=json_config(2, 1, 1)))
    data = torch.utils.data.DataLoader(list(range(12)), batch_size=3, shuffle=True)
    loader = accelerator.prepare_data_loader(data)
    assert (accelerator.num_processes, accelerator.process_index) == (world_size // 2, rank // 2)
    mine = [x for batch in loader for x in batch.tolist()]
    every = accelerator.gather(torch.tensor([rank])).tolist()
    objects = accelerator.gather_for_metrics([f"rank {rank}"], use_gather_object=True)
    total = accelerator.reduce(torch.tensor([1.0])).item()
    assert (every, objects, total) == (
        [0, 2][: world_size // 2],
        [f"rank {r}" for r in every],
        world_size // 2,
    )
    return mine


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_of_a_ring_shuffle_alike_without_a_seed(rank_pool: Any, world: int) -> None:
    pytest.importorskip("accelerate")
    by_rank = rank_pool(world).run(ids_of_a_shuffling_loader)
    assert all(by_rank[rank] == by_rank[rank - 1] for rank in range(1, world, 2))
    assert sorted(by_rank[0] + (by_rank[2] if world == 4 else [])) == list(range(12))


ROLLOUTS = ("trl.GRPOConfig", "trl.RLOOConfig", "trl.experimental.online_dpo.OnlineDPOConfig")


def refusals(rank: int, world_size: int) -> dict[str, str]:
    deepspeed = start_deepspeed()
    import ds_ring
    from ds_ring.integrations.deepspeed.initialize import (
        _start_engine,
    )  # as an import from before would have it

    ds_ring.enable()
    from accelerate import Accelerator, DataLoaderConfiguration, DeepSpeedPlugin
    from accelerate.state import AcceleratorState

    size = Size(hidden=32, layers=1, tokens=16, samples=2)
    config = json_config(2, 2, 1)
    model = build_model(size, "sdpa")
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    plugin = DeepSpeedPlugin(hf_ds_config=config)
    dispatch = DataLoaderConfiguration(dispatch_batches=True)
    bare = {key: value for key, value in config.items() if key not in RING_KEYS}
    found = {}
    for name, call in {
        "from before": lambda: _start_engine(model=model, config=config),
        "no section": lambda: deepspeed.initialize(model=model, optimizer=sgd, config=bare),
        "no DeepSpeed": Accelerator,
        "dispatch": lambda: Accelerator(deepspeed_plugin=plugin, dataloader_config=dispatch),
        "sum": lambda: deepspeed.initialize(
            model=model, optimizer=sgd, config=config | {"gradient_allreduce_op": "sum"}
        ),
    }.items():
        AcceleratorState._reset_state(reset_partial_state=True)
        try:
            call()
        except ds_ring.RingError as error:
            found[name] = str(error)
    for home in ROLLOUTS:
        try:
            load(home)("unused", deepspeed=dict(config), bf16=False)
        except ds_ring.RingConfigError as error:
            found[home] = str(error)
    model = build_model(size, "sdpa")
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = deepspeed.initialize(model=model, optimizer=sgd, config=config)[0]
    engine.eval()
    prompt = build_batch(size)["input_ids"][:, :6]
    on_the_ring = engine.module.generate(prompt, max_new_tokens=5, do_sample=False)
    with engine.ring.off():
        found["generated"] = str(
            on_the_ring.equal(engine.module.generate(prompt, max_new_tokens=5, do_sample=False))
        )
    return found


def test_what_cannot_be_honoured_is_refused(rank_pool: Any) -> None:
    pytest.importorskip("trl")
    words = {
        "from before": "call ds_ring.enable() before you import the name",
        "no section": "ring_attention: expected this section, got none",
        "no DeepSpeed": "every rank would train by itself",
        "dispatch": "dispatch_batches: expected None or false",
        "sum": 'gradient_allreduce_op: expected "mean"',
        "generated": "True",
        **dict.fromkeys(ROLLOUTS, "policy training (GRPO, RLOO and other online methods) is not supported"),
    }
    for found in rank_pool(2).run(refusals):
        assert found.keys() == words.keys()
        for name, text in words.items():
            assert text in found[name], name


def losses_of_trl(rank: int, world_size: int, method: str, config: str, output: str) -> Entries:
    """What TRL's trainer of preferences logs in four steps; on one process without a ring."""
    deepspeed = start_deepspeed()
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    from accelerate.state import AcceleratorState, GradientState
    from datasets import Dataset
    from transformers import AutoModelForSequenceClassification
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    import ds_ring

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    unset_hf_deepspeed_config()
    multiprocessing.current_process()._config["daemon"] = False
    sys.path.insert(0, str(EXAMPLES))
    import text

    if world_size > 1:
        ds_ring.enable()
    trl = __import__("trl")
    model, tokenizer = text.model(), text.tokenizer()
    reference = {"ref_model": text.model()} if method == "DPO" else {}
    if method == "Reward":
        torch.manual_seed(0)
        model.config.num_labels, model.config.pad_token_id = 1, tokenizer.pad_token_id
        model = AutoModelForSequenceClassification.from_config(model.config)
    source = [one[200:300] for one in text.files(8)]
    pairs = [{"chosen": one[30 : 60 + 5 * n], "rejected": one[35:90]} for n, one in enumerate(source)]
    if method == "DPO":
        pairs = [{"prompt": one[:30]} | pair for one, pair in zip(source, pairs, strict=True)]
    arguments = getattr(trl, f"{method}Config")(
        output, deepspeed=config, max_length=128, per_device_train_batch_size=2, max_steps=3, learning_rate=1e-2,
        bf16=False, logging_steps=1, report_to=[], disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    trainer = getattr(trl, f"{method}Trainer")(
        model=model, args=arguments, train_dataset=Dataset.from_list(pairs), processing_class=tokenizer,
        **reference,
    )  # fmt: skip
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    return [{key: value for key, value in entry.items() if not key.endswith("runtime")} for entry in steps]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["DPO", "Reward"])
def test_trl_on_preferences_has_the_losses_of_one_process(
    rank_pool: Any, tmp_path: Path, method: str
) -> None:
    pytest.importorskip("trl")
    ring_json = EXAMPLES / "ds_config.json"
    plain_json = plain_config(tmp_path, json.loads(ring_json.read_text()))
    (expected,) = rank_pool(1).run(losses_of_trl, method, plain_json, str(tmp_path / "plain"))
    for got in rank_pool(2).run(losses_of_trl, method, str(ring_json), str(tmp_path / "ring")):
        assert len(got) == len(expected) == 3
        for one, other in zip(got, expected, strict=True):
            assert one == pytest.approx(other, rel=2e-5, abs=2e-5)  # rewards are differences of sums


def losses_under_ray(workers: int, output: Path) -> list[float]:
    """What the example prints, by the real Ray; its workers' lines come twice."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "ray_train.py"), "--workers", str(workers), "--output", str(output)],
        env=os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
    found = [ast.literal_eval(line) for line in re.findall(r"\{'loss': [^}]*\}", done.stdout)]
    assert {entry["ring_size"] for entry in found if "ring_size" in entry} == {workers}
    return list(dict.fromkeys(entry["loss"] for entry in found))


@pytest.mark.night
@pytest.mark.needs("ray")
@pytest.mark.timeout(600)
def test_ray_trains_a_ring_of_two_as_one_worker(tmp_path: Path) -> None:
    rings, alone = (losses_under_ray(workers, tmp_path / str(workers)) for workers in (2, 1))
    assert len(alone) == 8 and alone[-1] < alone[0]
    assert rings == pytest.approx(alone, rel=1e-5)
