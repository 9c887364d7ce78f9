"""Every number that transformers' Trainer logs on a ring, against one process without one.

Owns Trainer with models and losses of one's own; scripts and TRL's trainers are test_trainers.py's. No key of a log is
left out: what is a time is held to what it counts (`check_logs`).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from ds_ring.data.loader import padded
from tests.dist.deepspeed_ranks import start_deepspeed
from tests.dist.trainer_logs import Logs, check_logs, configs, start_trainers


class Both(NamedTuple):
    loss: Tensor
    logits: Tensor


@dataclass
class Fields:
    loss: Tensor
    logits: Tensor


@dataclass(frozen=True, slots=True)
class Frozen:
    loss: Tensor
    logits: Tensor


class Attributes:
    def __init__(self, loss: Tensor, logits: Tensor) -> None:
        self.loss, self.logits = loss, logits


FORMS: dict[str, Any] = {
    "ModelOutput": lambda result: result,
    "dict": lambda result: {"loss": result.loss, "logits": result.logits},
    "tuple": lambda result: (result.loss, result.logits),
    "list": lambda result: [result.loss, result.logits],
    "named tuple": lambda result: Both(result.loss, result.logits),
    "dataclass": lambda result: Fields(result.loss, result.logits),
    "frozen dataclass": lambda result: Frozen(result.loss, result.logits),
    "attributes": lambda result: Attributes(result.loss, result.logits),
    "tensor": lambda result: result.loss,
    "inner": lambda result: {"loss": result.loss, "inner": result, "two": {"halves": (result.loss / 2,) * 2}},
}


class Wrapped(nn.Module):
    """A model whose output has another form."""

    def __init__(self, model: nn.Module, form: str) -> None:
        super().__init__()
        self.model, self.form = model, form

    def forward(
        self, input_ids: Tensor, labels: Any = None, num_items_in_batch: Any = None, **extra: Any
    ) -> Any:
        result = self.model(input_ids, labels=labels, num_items_in_batch=num_items_in_batch, **extra)
        return FORMS[self.form](result)


def loss_in(form: str, output: Any) -> Tensor:
    if form == "tensor":
        return output
    if form == "inner":
        return output["inner"]["loss"] / 2 + output["two"]["halves"][0]
    if isinstance(output, Mapping):
        return output["loss"]
    return output[0] if isinstance(output, tuple | list) else output.loss


def mean_of(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def of_logits(output: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    return mean_of(output["logits"], labels) * (labels[:, 1:] != -100).sum() / num_items_in_batch


OWN_LOSSES = ("compute_loss", "compute_loss_func", "label smoothing", "teacher")


def run_trainer(
    rank: int, world_size: int, cases: list[str], config: str, ring: bool, extra: dict[str, Any]
) -> dict[str, Logs]:
    """What Trainer logs with models, or losses, of one's own."""
    start_deepspeed()
    import ds_ring

    if ring:
        ds_ring.enable()
    return {case: logs_of(case, config, dict(extra)) for case in cases}


def logs_of(case: str, config: str, settings: dict[str, Any]) -> Logs:
    start_trainers()
    import text
    from transformers import Trainer, TrainingArguments

    class Own(Trainer):
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            if case == "compute_loss":
                output = model(input_ids=inputs["input_ids"])
                loss = mean_of(output.logits, inputs["labels"])
            elif case == "teacher":
                output = model(**inputs)
                with torch.no_grad():
                    known = teacher(**inputs).logits
                loss = output.loss + (output.logits - known).pow(2).mean()
            else:
                assert not any("ds_ring" in name for name in inputs)
                output = model(**inputs, num_items_in_batch=num_items_in_batch)
                loss = loss_in(case, output)
                if case not in ("tensor", "ModelOutput", "dict", "tuple", "list", "named tuple", "inner"):
                    output = (loss, output.logits)  # Trainer reads [1:] of what is not a dict
                elif case == "tensor":
                    output = {}
            return (loss, output) if return_outputs else loss

    model: Any = text.model(use_cache=False)
    torch.manual_seed(1)
    teacher = type(model)(copy.deepcopy(model.config)).eval()
    local: dict[str, Any] = {}
    if case == "compute_loss_func":
        local = {"compute_loss_func": of_logits}
    elif case == "label smoothing":
        settings["label_smoothing_factor"] = 0.1
    samples, held_out = text.samples(8, 60), text.samples(3, 50)
    if settings.pop("random", False):
        local["data_collator"] = draw_labels
    if settings.get("train_sampling_strategy") == "batch_rebalance":
        samples = [{name: x[: 60 - 7 * row] for name, x in item.items()} for row, item in enumerate(samples)]
        local["data_collator"] = padded
    if (lengths := settings.pop("lengths", ())) != ():  # the last batch has another number of samples, too
        rows = zip(text.samples(len(lengths), max(lengths)), lengths, strict=True)
        samples = [{name: x[:length] for name, x in item.items()} for item, length in rows]
        local["data_collator"] = padded
    if settings.pop("iterable", False):
        samples, held_out = Stream(samples), Stream(held_out)
    arguments = {
        "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "max_steps": 2, "learning_rate": 1e-2,
        "logging_steps": 1, "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "no", "report_to": [],
        "disable_tqdm": True, "include_num_input_tokens_seen": "all",
    } | settings  # fmt: skip
    kind = Own if case in FORMS or case in ("compute_loss", "teacher") else Trainer
    trainer = kind(
        model=Wrapped(model, case) if case in FORMS else model,
        args=TrainingArguments(str(Path(config).parent / "runs"), deepspeed=config, **arguments),
        train_dataset=samples, eval_dataset=held_out, **local,
    )  # fmt: skip
    trainer.train()
    predicted = trainer.predict(held_out)
    logs: Logs = [*trainer.state.log_history, predicted.metrics]
    return [*logs, {"predictions": size_of(predicted.predictions)}]


def size_of(result: Any) -> float:
    """The sum of the sizes of all numbers in an output."""
    if isinstance(result, Mapping | tuple | list):
        return sum(map(size_of, result.values() if isinstance(result, Mapping) else result))
    return 0.0 if result is None else float(torch.as_tensor(result).abs().double().sum())


def draw_labels(samples: list[Any]) -> dict[str, Tensor]:
    """A random collator: which tokens have a label is drawn."""
    batch = padded(samples)
    batch["labels"] = batch["labels"].masked_fill(torch.rand(batch["labels"].shape) < 0.3, -100)
    return batch


class Stream(torch.utils.data.IterableDataset[Any]):
    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def __iter__(self) -> Any:
        return iter(self.samples)


@pytest.mark.situation("trainers", "an IterableDataset on several replicas")
@pytest.mark.night
def test_streams_of_replicas_are_evaluated_as_on_one_process(rank_pool: Any, tmp_path: Path) -> None:
    """Ring 2 x data 2, one sample a replica, and the last round half full; the model stays as it is."""
    plain, on_ring = configs(tmp_path, 2, zero_optimization={"stage": 2})
    local = {"iterable": True, "per_device_eval_batch_size": 1, "learning_rate": 0.0}
    expected = rank_pool(1).run(run_trainer, ["compute_loss"], plain, False, local)[0]["compute_loss"]
    local["per_device_train_batch_size"] = 1
    for logs in rank_pool(4).run(run_trainer, ["compute_loss"], on_ring, True, local):
        for item, second in zip(logs["compute_loss"], expected, strict=True):
            for key in item.keys() & {
                "eval_loss",
                "test_loss",
                "predictions",
                "total_flos",
                "num_input_tokens_seen",
            }:
                assert item[key] == pytest.approx(second[key], rel=2e-5), key


OPTIONS: dict[str, dict[str, Any]] = {
    "batch_rebalance": {"train_sampling_strategy": "batch_rebalance", "gradient_accumulation_steps": 2},
    "group_by_length": {"train_sampling_strategy": "group_by_length"},
    "random collator": {"random": True},
    "random collator in workers": {"random": True, "dataloader_num_workers": 2},
    "averaged": {"average_tokens_across_devices": False, "gradient_accumulation_steps": 2},
    "metrics by batch": {"eval_accumulation_steps": 1, "eval_do_concat_batches": False},
}
LENGTHS = {"lengths": (60, 60, 40, 60, 37), "max_steps": 5, "gradient_accumulation_steps": 2}
# What a row is for: its names, the sizes of rings, cases of `run_trainer`, options of Trainer.
Compared = dict[str, tuple[tuple[int, ...], tuple[str, ...], dict[str, Any]]]
COMPARED: dict[str, Compared] = {
    "a model returns a dict, a tuple or a dataclass, and is evaluated": {
        "some forms": ((2, 4), ("dataclass", "tensor"), {}), "all forms": ((2, 4), tuple(FORMS), {}),
    },
    "compute_loss of one's own, label smoothing, a teacher": {"own losses": ((2, 4), tuple(OWN_LOSSES), {})},
    "an option of TrainingArguments": {
        name: ((2,), ("ModelOutput",), options) for name, options in OPTIONS.items()
    },
    "batches of different lengths, the last one of fewer samples": {
        "lengths": ((2,), ("ModelOutput",), LENGTHS),
        "lengths, streamed": ((2,), ("ModelOutput",), LENGTHS | {"iterable": True}),
    },
    "an IterableDataset whose last batch is incomplete": {
        "streamed": ((2, 4), ("ModelOutput",), {"iterable": True})
    },
}  # fmt: skip


@pytest.mark.night
@pytest.mark.parametrize(
    ("ring", "cases", "extra"),
    [
        pytest.param(
            ring, cases, extra, marks=pytest.mark.situation("trainers", what), id=f"{name}, ring {ring}"
        )
        for what, rows in COMPARED.items()
        for name, (rings, cases, extra) in rows.items()
        for ring in rings
    ],
)
def test_trainer_logs_what_one_process_does(
    rank_pool: Any, tmp_path: Path, ring: int, cases: tuple[str, ...], extra: dict[str, Any]
) -> None:
    """Losses, evaluations, predictions and numbers of tokens."""
    plain, on_ring = configs(tmp_path, ring, zero_optimization={"stage": 2})
    expected = rank_pool(1).run(run_trainer, cases, plain, False, extra)[0]
    for logs in rank_pool(ring).run(run_trainer, cases, on_ring, True, extra):
        for name in cases:
            print(name, check_logs(logs[name], expected[name]))
