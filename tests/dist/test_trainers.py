"""Trainer, Accelerate, TRL and DeepSpeed's tutorial on a ring: the example scripts, against one process without a ring.

The plain script is the example without its two lines for the ring, run by one process; the numbers that it prints
(losses, evaluations, gradient norms, learning rates, tokens, accuracies) are compared one by one.
"""

from __future__ import annotations

import ast
import contextlib
import io
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ds_ring
from ds_ring.engines.trainers.trl import TRL, _Distillation, _read_batch
from ds_ring.plugin import load
from tests.dist.deepspeed_ranks import Size, build_batch, build_model, json_config, start_deepspeed
from tests.dist.harness import RankPool, catch_refusal, check_texts, run_ranks
from tests.dist.trainer_logs import EXAMPLES, RING_KEYS, Logs, check_logs, configs, start_trainers

STEPS = 2  # of TRL's trainers


def plain_script(name: str) -> str:
    """The example without what makes it a ring."""
    lines = (EXAMPLES / name).read_text().splitlines()
    added = [line for line in lines if line.startswith(("import ds_ring", "ds_ring."))]
    assert len(added) + len(RING_KEYS) <= 5, added
    return "\n".join(line for line in lines if line not in added)


def run_example(rank: int, world_size: int, name: str, arguments: list[str], plain: bool) -> Logs:
    """What the script prints on this rank."""
    source = plain_script(name) if plain else (EXAMPLES / name).read_text()
    return run_script(name, source, arguments)[0]


def run_script(name: str, source: str, arguments: list[str]) -> tuple[Logs, dict[str, Any]]:
    """What a script prints on this rank, and its names."""
    start_deepspeed()
    start_trainers()
    sys.argv = [name, *arguments]
    names: dict[str, Any] = {"__name__": "__main__"}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(source, str(EXAMPLES / name), "exec"), names)
    result = [ast.literal_eval(line) for line in printed.getvalue().splitlines() if line.startswith("{")]
    # Not Trainer's own lines, whose numbers are strings.
    logs = [entry for entry in result if not any(isinstance(value, str) for value in entry.values())]
    return logs, names


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
    plain = ["--config", configs(tmp_path)[0], "--output", str(tmp_path / "plain")]
    expected = rank_pool(1).run(run_example, script, plain, True)[0]
    ring = ["--config", str(EXAMPLES / "ds_config.json"), "--output", str(tmp_path / "ring")]
    got = rank_pool(2).run(run_example, script, ring, False)[0]
    assert len(expected) >= 6
    check_logs(got, expected)
    checkpoint, before = SCRIPTS[script]
    ring[-1] = str(tmp_path / "resumed")
    resume = [*ring, "--resume", str(tmp_path / "ring" / checkpoint)]
    resumed = got[:before] + rank_pool(2).run(run_example, script, resume, False)[0]
    for entry in [*resumed, *expected]:
        for key in ("num_tokens", "eval_num_tokens"):  # of TRL, which counts from 0 again
            entry.pop(key, None)
        for key in [
            key for key in entry if key.startswith("train_")
        ]:  # of the steps since the start or resumption
            del entry[key]
    check_logs(resumed, expected)


@pytest.mark.night
@pytest.mark.parametrize("script", ["hf_trainer.py", "accelerate_loop.py"])
def test_replicas_of_a_ring_see_other_samples(rank_pool: Any, tmp_path: Path, script: str) -> None:
    """Ring 2 x data 2 at ZeRO 3: one sample a replica is two on one process; evaluation fills up its last batch."""
    pytest.importorskip("accelerate")
    changes = {"zero_optimization": {"stage": 3}, "ring_attention": {"ring_size": 2, "layout": "auto"}}
    plain_json, ring_json = configs(tmp_path, "auto", **changes)
    plain = ["--config", plain_json, "--output", str(tmp_path / "plain")]
    expected = rank_pool(1).run(run_example, script, plain, True)[0]
    ring = ["--config", ring_json, "--output", str(tmp_path / "ring"), "--batch_size", "1"]
    got = rank_pool(4).run(run_example, script, ring, False)[0]
    # An evaluation's loss is a mean over batches, and those of one process are others.
    for entries in (got, expected):
        for entry in entries:
            entry.pop("eval_loss", None), entry.pop("held out", None)
    check_logs(got, expected)


def ids_of_a_shuffling_loader(rank: int, world_size: int, axis: str, seedable: bool) -> list[int]:
    start_deepspeed()
    ds_ring.enable()
    from accelerate import Accelerator, DataLoaderConfiguration, DeepSpeedPlugin
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.state import AcceleratorState
    from accelerate.utils import set_seed

    AcceleratorState._reset_state(reset_partial_state=True)
    torch.manual_seed(rank)
    config, parallel = json_config(2, 1, 1), None
    if axis:  # accelerate's words instead of the section
        config = {key: value for key, value in config.items() if key not in RING_KEYS}
        parallel = ParallelismConfig(**{f"{axis}_size": 2, f"{axis}_backend": "ds_ring"})
    plugin = DeepSpeedPlugin(hf_ds_config=config)
    seeds = DataLoaderConfiguration(use_seedable_sampler=seedable)
    accelerator = Accelerator(deepspeed_plugin=plugin, parallelism_config=parallel, dataloader_config=seeds)
    data = torch.utils.data.DataLoader(list(range(12)), batch_size=3, shuffle=True)
    loader = accelerator.prepare_data_loader(data)
    assert (accelerator.num_processes, accelerator.process_index) == (world_size // 2, rank // 2)
    state = torch.get_rng_state()
    set_seed(7, device_specific=True)
    assert torch.initial_seed() == 7 + rank // 2, "ranks of a sequence draw alike, replicas do not"
    torch.set_rng_state(state)
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


@pytest.mark.day("2--False", "2-cp-True")
@pytest.mark.situation("trainers", "no seed is set")
@pytest.mark.parametrize(
    ("world", "axis", "seedable"),
    [(2, "", False), (4, "", False), (4, "sp", False), (2, "cp", True), (4, "", True)],
)
def test_ranks_of_a_ring_shuffle_alike_without_a_seed(
    rank_pool: Any, world: int, axis: str, seedable: bool
) -> None:
    pytest.importorskip("accelerate")
    by_rank = rank_pool(world).run(ids_of_a_shuffling_loader, axis, seedable)
    assert all(by_rank[rank] == by_rank[rank - 1] for rank in range(1, world, 2))
    assert sorted(by_rank[0] + (by_rank[2] if world == 4 else [])) == list(range(12))


ROLLOUTS: dict[str, dict[str, Any]] = {
    "trl.GRPOConfig": {"use_vllm": True},
    "trl.RLOOConfig": {"use_transformers_continuous_batching": True},
    "trl.experimental.online_dpo.OnlineDPOConfig": {},
}


def refusals(rank: int, world_size: int) -> dict[str, str]:
    deepspeed = start_deepspeed()
    from ds_ring.engines.deepspeed.initialize import (
        _start_engine,
    )  # as an import from before would have it

    ds_ring.enable()
    from accelerate import Accelerator, DataLoaderConfiguration, DeepSpeedPlugin
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.state import AcceleratorState

    size = Size(hidden=32, layers=1, tokens=16, samples=2)
    config = json_config(2, 2, 1)
    model = build_model(size, "sdpa")
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    plugin = DeepSpeedPlugin(hf_ds_config=config)
    dispatch = DataLoaderConfiguration(dispatch_batches=True)
    bare = {key: value for key, value in config.items() if key not in RING_KEYS}
    result = {}
    for name, call in {
        "from before": lambda: _start_engine(model=model, config=config),
        "no section": lambda: deepspeed.initialize(model=model, optimizer=sgd, config=bare),
        "no DeepSpeed": Accelerator,
        "dispatch": lambda: Accelerator(deepspeed_plugin=plugin, dataloader_config=dispatch),
        "other ranks": lambda: Accelerator(
            deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config),
            parallelism_config=ParallelismConfig(sp_size=4, sp_backend="ds_ring"),
        ),
        "another axis": lambda: Accelerator(
            deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config),
            parallelism_config=ParallelismConfig(sp_size=2, sp_backend="deepspeed"),
        ),
        "sum": lambda: deepspeed.initialize(
            model=model, optimizer=sgd, config=config | {"gradient_allreduce_op": "sum"}
        ),
    }.items():
        AcceleratorState._reset_state(reset_partial_state=True)
        result[name] = catch_refusal(call)
    for home, second in ROLLOUTS.items():
        result[home] = catch_refusal(load(home), "unused", deepspeed=dict(config), bf16=False, **second)
        assert result[home].startswith("RingConfigError: "), result[home]
    model = build_model(size, "sdpa")
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = deepspeed.initialize(model=model, optimizer=sgd, config=config)[0]
    engine.eval()
    prompt = build_batch(size)["input_ids"][:, :6]
    on_the_ring = engine.module.generate(prompt, max_new_tokens=5, do_sample=False)
    with engine.ring.off():
        assert on_the_ring.equal(engine.module.generate(prompt, max_new_tokens=5, do_sample=False))
    return result


@pytest.mark.situation("trainers", "an option that a ring cannot honour")
def test_what_cannot_be_honoured_is_refused(rank_pool: Any) -> None:
    pytest.importorskip("trl")
    words = {
        "from before": "ds_ring.enable() before you import the name",
        "no section": "ring_attention: expected this section, got none",
        "no DeepSpeed": "expected DeepSpeed with a",
        "dispatch": "dispatch_batches: expected None or false",
        "other ranks": 'expected 2 ranks ("sequence_parallel_size"), got 4',
        "another axis": "parallelism_config: expected no sp_size, got one above 1",
        "sum": 'gradient_allreduce_op: expected "mean"',
        "trl.GRPOConfig": "expected use_vllm=False, got True: vLLM samples on each rank by itself",
        "trl.RLOOConfig": "expected use_transformers_continuous_batching=False, got True: generate_batch",
        "trl.experimental.online_dpo.OnlineDPOConfig": "expected a method that has been compared",
    }
    check_texts(rank_pool(2).run(refusals), words)


class Bare(torch.nn.Module):
    """A model whose own module returns its loss, and takes no positions if it is told so."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Any, labels: Any = None, **extra: Any) -> Any:
        return self.model(input_ids, labels=labels, **extra).loss


class Unnumbered(Bare):
    def forward(self, input_ids: Any, labels: Any = None) -> Any:
        return self.model(input_ids, labels=labels)


def whole_batches(rank: int, world_size: int) -> dict[str, str]:
    """What engines say to batches and modules that cannot be whole on a ring."""
    deepspeed = start_deepspeed()
    ds_ring.enable()
    size = Size(hidden=32, layers=1, tokens=16, samples=2)
    config, batch = json_config(world_size, 2, 0), build_batch(size)
    ids = {"input_ids": batch["input_ids"]}
    short = config | {"ring_attention": config["ring_attention"] | {"min_sequence_length": 100}}
    dynamic = config | {"ring_attention": config["ring_attention"] | {"dynamic_ring": True}}
    borders = {"cu_seq_lens_q": torch.tensor([0, 8, 16]), "max_length_q": 8}
    rows: dict[str, tuple[dict[str, Any], Any, Callable[[Any], Any]]] = {
        "dynamic": (dynamic, lambda model: model, lambda engine: None),
        "loss": (config, Bare, lambda engine: engine(**batch)),
        "places": (config, Bare, lambda engine: engine(ids["input_ids"], None, None)),
        "positions": (config, Unnumbered, lambda engine: engine(**ids)),
        "borders": (config, lambda model: model, lambda engine: engine(**ids, **borders)),
        "short": (short, lambda model: model, lambda engine: engine(**ids).logits),
    }

    def start(section: dict[str, Any], wrap: Any, call: Callable[[Any], Any]) -> None:
        call(deepspeed.initialize(model=wrap(build_model(size, "sdpa")), config=section)[0])

    return {name: catch_refusal(start, *row) for name, row in rows.items()}


@pytest.mark.situation("trainers", "a trainer of whole sequences")
def test_what_cannot_be_whole_on_a_ring_is_refused(rank_pool: Any) -> None:
    words = {
        "dynamic": "dynamic_ring: expected false under ds_ring.enable(), got true",
        "loss": "Bare: expected logits, or a loss by num_items_in_batch, got a tensor",
        "places": "Bare: expected arguments by name, got 3",
        "positions": "Unnumbered.forward: expected position_ids, got ['input_ids', 'labels']; take them as an argument",
        "borders": "batch: expected position_ids with cu_seq_lens_q, got none",
        "short": "outputs: expected a sharded sequence, got 16 tokens, below min_sequence_length",
    }
    check_texts(rank_pool(2).run(whole_batches), words)


def late(rank: int, world_size: int) -> list[str]:
    """What `enable` says after each thing that has read the JSON, and of training when they are gone."""
    deepspeed = start_deepspeed()
    start_trainers()
    from accelerate import Accelerator, DeepSpeedPlugin
    from transformers import TrainingArguments

    size = Size(hidden=32, layers=1, tokens=16, samples=2)
    config = json_config(world_size, 2, 1)
    plain = {key: value for key, value in config.items() if key != "ring_attention"}
    model = build_model(size, "sdpa")
    result = []
    for make in (
        lambda: TrainingArguments("unused", deepspeed=dict(config), bf16=False),
        lambda: Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=dict(config))),
        lambda: deepspeed.initialize(
            model=model, optimizer=torch.optim.SGD(model.parameters()), config=plain
        )[0],
    ):
        element = make()
        if isinstance(element, deepspeed.DeepSpeedEngine):  # as one that was made before `import ds_ring`
            element._config._param_dict["ring_attention"] = config["ring_attention"]
        result.append(catch_refusal(ds_ring.enable))
        assert result[-1].startswith("RingConfigError: "), result[-1]
        if hasattr(element, "destroy"):
            element.destroy()
            (
                element.module_forward_pre_hook.remove(),
                element.module_forward_post_hook.remove(),
            )  # they keep the engine
        del element
        start_trainers()
    ds_ring.enable()
    engine = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters()), config=config)[
        0
    ]
    return [*result, str(bool(engine(**build_batch(size)).loss > 0))]


@pytest.mark.night
@pytest.mark.situation("trainers", "ds_ring.enable() after the model was prepared")
def test_a_late_enable_names_what_was_made_before() -> None:
    pytest.importorskip("accelerate")
    for result in run_ranks(late, 2):
        kinds = ("TrainingArguments", "Accelerator", "DeepSpeedEngine")
        for kind, text in zip(kinds, result, strict=False):
            assert f"ds_ring.enable(): expected no {kind} whose DeepSpeed JSON has" in text
        assert result[-1] == "True"


def share_of_low_bytes(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A reward that is known without a model."""
    return [sum(token < 128 for token in ids) / len(ids) for ids in completion_ids]


def save_model(folder: Path) -> Path:
    """Save the model of the examples, for trainers that load it twice; return its folder."""
    sys.path.insert(0, str(EXAMPLES))
    import text

    text.model().save_pretrained(folder / "model")
    return folder / "model"


def rows_and_models(method: str, trained: Any, extra: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Eight rows of a data set for a trainer of TRL's, and what it takes beside the model."""
    import text

    source = [element[200:300] for element in text.files(8)]
    if method == "SFT":
        return [{"text": element[: 50 + 5 * n]} for n, element in enumerate(source)], {}
    if method in ("DPO", "Reward"):
        pairs = [
            {"chosen": element[30 : 60 + 5 * n], "rejected": element[35:90]}
            for n, element in enumerate(source)
        ]
        if method == "Reward":
            return pairs, {}
        return [{"prompt": element[:30]} | row for element, row in zip(source, pairs, strict=True)], {
            "ref_model": text.model()
        }
    if method == "KTO":
        return [
            {"prompt": element[:30], "completion": element[30 : 60 + 5 * n], "label": n % 3 == 0}
            for n, element in enumerate(source)
        ], {"ref_model": text.model()}
    extra |= {"max_completion_length": 8, "temperature": 0.9} | extra
    prompts = [{"prompt": element[: 20 + 3 * n]} for n, element in enumerate(source)]
    if method == "Distillation":
        torch.manual_seed(1)
        teacher = type(trained)(trained.config)
        teacher.get_output_embeddings().weight.data *= 10  # a loss of some size
        return prompts, {"teacher_model": teacher}
    extra |= {"num_generations": 2, "beta": 0.1, "steps_per_generation": 2} | extra
    return prompts, {"reward_funcs": share_of_low_bytes}


def run_trl(
    rank: int, world_size: int, method: str, model: str, config: str, ring: bool, extra: dict[str, Any]
) -> Logs:
    """What a trainer of TRL's logs in two steps and evaluations, with the completions that it sampled."""
    start_deepspeed()
    start_trainers()
    import text
    from datasets import Dataset
    from transformers import AutoModelForSequenceClassification

    if ring:
        ds_ring.enable()
    trl = __import__("trl")
    trained: Any = text.model()
    if method == "Reward":
        torch.manual_seed(0)
        trained.config.num_labels, trained.config.pad_token_id = 1, text.tokenizer().pad_token_id
        trained = AutoModelForSequenceClassification.from_config(trained.config)
    settings = {
        "per_device_train_batch_size": 4, "max_steps": STEPS, "learning_rate": 1e-2, "bf16": False, "logging_steps": 1,
        "report_to": [], "disable_tqdm": True, "save_strategy": "no", "per_device_eval_batch_size": 4,
        "eval_strategy": "steps", "eval_steps": 1, "include_num_input_tokens_seen": "all",
    } | extra  # fmt: skip
    rows, operands = rows_and_models(method, trained, settings)
    arguments = getattr(trl, f"{method}Config")(
        str(Path(config).parent / "runs"), deepspeed=config, **settings
    )
    # By name where the trainer makes its reference from it.
    trainer = getattr(trl, f"{method}Trainer")(
        model=model if "reward_funcs" in operands else trained, args=arguments, processing_class=text.tokenizer(),
        train_dataset=Dataset.from_list(rows), eval_dataset=Dataset.from_list(rows[:6]), **operands,
    )  # fmt: skip
    seen = watch_rollouts(trainer) if hasattr(trainer, "_logs") else []
    trainer.train()
    trainer.evaluate()
    return [*trainer.state.log_history, *seen]


def watch_rollouts(trainer: Any) -> list[dict[str, Any]]:
    """Fill in, for each batch, the completions, and how far the log-probabilities are from the old ones."""
    loss, logps = trainer.compute_loss, getattr(trainer, "_get_per_token_logps_and_entropies", None)
    seen: list[dict[str, Any]] = []
    latest: list[torch.Tensor] = []

    def note_logps(*args: Any, **kwargs: Any) -> Any:
        result = logps(*args, **kwargs)
        latest[:] = [result[0].detach()]
        return result

    def note(model: Any, inputs: dict[str, Any], **items: Any) -> Any:
        result = loss(model, inputs, **items)
        old = inputs.get("old_per_token_logps", inputs.get("old_logps"))
        seen.append({"completions": inputs["completion_ids"].tolist()})
        if old is not None:  # TRL takes the new ones where no update lies between
            new = latest[0] if old.ndim > 1 else (latest[0] * inputs["completion_mask"]).sum(1)
            seen[-1]["moved"] = float((new - old).abs().max())
        return result

    trainer._get_per_token_logps_and_entropies, trainer.compute_loss = note_logps, note
    return seen


def padded_on_the_left(rank: int, world_size: int) -> tuple[float, float, list[str]]:
    """How far logits of real tokens, and the loss, are from those without a ring; what two wrong batches raise."""
    deepspeed = start_deepspeed()
    from transformers import GPT2Config, GPT2LMHeadModel

    ds_ring.enable()
    torch.manual_seed(0)
    # with learned positions, which padding counts in
    config = GPT2Config(vocab_size=61, n_positions=24, n_embd=32, n_layer=2, n_head=4)
    model = GPT2LMHeadModel(config).eval()
    batch = build_batch(Size(hidden=32, layers=2, tokens=24, samples=3))
    lengths = torch.tensor([24, 20, 9])
    real = torch.arange(24)[None] >= 24 - lengths[:, None]
    labels = batch["input_ids"].masked_fill(~real | (torch.arange(24) < 18), -100)
    operands = {"input_ids": batch["input_ids"], "attention_mask": real.long(), "labels": labels}
    expected = model(**operands)
    engine = deepspeed.initialize(model=model, config=json_config(world_size, 3, 0))[0]
    output = engine(**operands)
    logits = float((output.logits - expected.logits)[real].abs().max())
    hole = real.long().index_fill(1, torch.tensor([22]), 0)
    wrong = {"attention_mask": hole}, {"labels": batch["input_ids"]}
    refused = [catch_refusal(engine, **operands | changes) for changes in wrong]
    return logits, float((output.loss - expected.loss).abs()), refused


@pytest.mark.situation("padding", "prompts that are padded on the left")
def test_padding_on_the_left_is_moved_out_of_the_way(rank_pool: Any) -> None:
    for logits, loss, refused in rank_pool(2).run(padded_on_the_left):
        assert max(logits, loss) <= 2e-6
        assert "got a masked token" in refused[0] and "in padding, got" in refused[1]


METHODS = ("SFT", "DPO", "KTO", "Reward", "GRPO", "RLOO", "Distillation")
OF_ONE_PROCESS: dict[str, Logs] = {}


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("ring", [1, 2, 4])
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.day("2-2-DPO")  # with log-probabilities and a reference model; rollouts are sampled at night
def test_trl_is_the_same_as_on_one_process(
    rank_pool: Any, tmp_path: Path, method: str, ring: int, stage: int
) -> None:
    pytest.importorskip("trl")
    model = str(save_model(tmp_path))
    plain_json = configs(tmp_path)[0]
    if method not in OF_ONE_PROCESS:
        OF_ONE_PROCESS[method] = rank_pool(1).run(run_trl, method, model, plain_json, False, {})[0]
    expected = OF_ONE_PROCESS[method]
    ring_json = configs(tmp_path, ring, zero_optimization={"stage": stage})[1]
    # `enable` is for good: the pool of one rank stays without a ring.
    pool = rank_pool(ring) if ring > 1 else RankPool(1)
    got = pool.run(run_trl, method, model, ring_json, True, {})
    if ring == 1:
        pool.close()
    worst = max(check_logs(logs, expected) for logs in got)
    print(f"{method}, ring {ring}, ZeRO {stage}: {sum(map(len, expected))} keys, {worst:.1e}")
    if method in ("GRPO", "RLOO"):
        moved = [entry["moved"] for entry in got[0] if "moved" in entry]
        assert moved[0] <= 1e-5 < 1e-2 < max(moved)  # before the first update, and after


def run_grpo_by_its_backend(rank: int, world_size: int, model: str, config: str) -> Logs:
    """Run GRPO on a ring that only `parallelism_config` asks for."""
    start_deepspeed()
    ds_ring.enable()
    from accelerate.parallelism_config import ParallelismConfig

    parallel = ParallelismConfig(sp_size=world_size, sp_backend="ds_ring")
    assert parallel.sp_enabled
    return run_trl(rank, world_size, "GRPO", model, config, True, {"parallelism_config": parallel})


@pytest.mark.night
@pytest.mark.needs("sp_backend registry")
def test_grpo_runs_on_a_registered_backend_as_on_one_process(rank_pool: Any, tmp_path: Path) -> None:
    """tests/integration/test_upstream.py runs it with patched packages."""
    model, plain = str(save_model(tmp_path)), configs(tmp_path)[0]
    expected = rank_pool(1).run(run_trl, "GRPO", model, plain, False, {})[0]
    for logs in rank_pool(2).run(run_grpo_by_its_backend, model, plain):
        check_logs(logs, expected)


def test_every_target_in_trl_exists() -> None:
    pytest.importorskip("trl")
    TRL.check()


def test_a_distillation_of_images_or_on_two_layouts_is_refused() -> None:
    pytest.importorskip("trl")
    ids = torch.arange(3)[None]
    inputs = {"prompt_ids": ids, "prompt_mask": ids > 0, "completion_ids": ids, "completion_mask": ids < 2}
    batch, labels = _read_batch(inputs)
    assert batch["attention_mask"].tolist() == [[0, 1, 1, 1, 1, 0]]
    assert labels.tolist() == [[-100, -100, -100, 0, 1, -100]]
    of_tools = {"tool_mask": torch.tensor([[1, 0, 1]])}  # a tool wrote the second token
    assert _read_batch(inputs | of_tools)[1].tolist() == [[-100, -100, -100, 0, -100, -100]]
    with pytest.raises(ds_ring.RingConfigError, match="expected text alone on a ring, got pixel_values"):
        _read_batch(inputs | {"pixel_values": ids})
    layouts = [
        ds_ring.make_layout(name, tokens=16, ring_size=2, pattern=ds_ring.Causal())
        for name in ("zigzag", "contiguous")
    ]
    distillation = _Distillation()
    distillation._layout = layouts[0]
    distillation._check_layout(layouts[0])
    with pytest.raises(ds_ring.RingConfigError, match="got zigzag and contiguous: set"):
        distillation._check_layout(layouts[1])


@pytest.mark.night
@pytest.mark.parametrize("method", ["KTO", "GRPO", "RLOO", "Distillation"])
def test_replicas_of_a_ring_sample_as_processes_do(rank_pool: Any, tmp_path: Path, method: str) -> None:
    """Ring 2 x data 2 against data 2, each with rings of one rank: a group of rollouts lies on both replicas."""
    pytest.importorskip("trl")
    model = str(save_model(tmp_path))
    runs, extra = [], {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    if method in ("GRPO", "RLOO"):
        extra |= {"num_generations": 4}
    for ring in (1, 2):
        config = configs(tmp_path, ring)[1]
        runs.append(rank_pool(2 * ring).run(run_trl, method, model, config, True, extra))
    for rank, entries in enumerate(runs[1]):
        check_logs(entries, runs[0][rank // 2])
    completions = [[entry for entry in runs[1][rank] if "completions" in entry] for rank in (0, 2)]
    assert method == "KTO" or completions[0] != completions[1]


def losses_under_ray(workers: int, output: Path) -> list[float]:
    """What the example prints, by the real Ray; its workers' lines come twice."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "ray_train.py"), "--workers", str(workers), "--output", str(output)],
        env=os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
    result = [ast.literal_eval(line) for line in re.findall(r"\{'loss': [^}]*\}", done.stdout)]
    assert {entry["ring_size"] for entry in result if "ring_size" in entry} == {workers}
    return list(dict.fromkeys(entry["loss"] for entry in result))


@pytest.mark.night
@pytest.mark.needs("ray")
@pytest.mark.timeout(600)
def test_ray_trains_a_ring_of_two_as_one_worker(tmp_path: Path) -> None:
    rings, alone = (losses_under_ray(workers, tmp_path / str(workers)) for workers in (2, 1))
    assert len(alone) == 8 and alone[-1] < alone[0]
    assert rings == pytest.approx(alone, rel=1e-5)
