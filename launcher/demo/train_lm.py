"""Train a byte-level language model whose sequences are sharded over a ring: an ordinary DeepSpeed script.

A small Llama with random weights learns Python's standard library. Two parts are not ordinary:
`ds_ring.initialize` in place of `deepspeed.initialize`, and the comparison with one process at the end.

Example:
    ds-ring launch configs/quickstart.yaml
    deepspeed --num_gpus 2 --module ds_ring_launcher.demo.train_lm --deepspeed_config configs/packed.json
"""

from __future__ import annotations

import argparse
import itertools
import logging
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import default_collate
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

import ds_ring
from ds_ring_launcher.demo.lm_compare import Comparison, compare
from ds_ring_launcher.demo.lm_data import VOCABULARY, PackedBytes
from ds_ring_launcher.demo.lm_report import Report, peak_memory_mib

OPTIONS: dict[str, tuple[Any, str]] = {
    "steps": (200, "optimizer steps in all, resumed ones included"),
    "sequence_length": (1024, "tokens of a sample; any number"),
    "model_config": ("", "a config.json of transformers, in place of a Llama of these sizes"),
    "hidden_size": (128, "width of the model"),
    "layers": (4, "decoder layers"),
    "heads": (4, "query heads; there are half as many K/V heads"),
    "seed": (0, "of the weights and of the order of the data"),
    "output": (Path("runs/train_lm"), "log, picture, checkpoints"),
    "evaluate_every": (40, "steps between held-out evaluations; 0: none"),
    "save_every": (0, "steps between checkpoints; 0: only at the end"),
    "compare_tokens": (4096, "length of the samples that are compared with one process at the end; 0: none"),
    "local_rank": (-1, "set by the launcher"),
}


def parse_options() -> argparse.Namespace:
    """Return the options of this script and of DeepSpeed."""
    parser = argparse.ArgumentParser(
        description="Train a byte-level language model on Python's standard library, on a ring.",
        epilog="example: ds-ring launch configs/quickstart.yaml -- --steps 300 --sequence_length 4096",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for name, (default, text) in OPTIONS.items():
        parser.add_argument(f"--{name}", type=type(default), default=default, help=text)
    parser.add_argument(
        "--resume", action="store_true", help="continue from the newest whole checkpoint, if any"
    )
    parser.add_argument("--verbose", action="store_true", help="DeepSpeed's own log lines, too")
    return deepspeed.add_config_arguments(parser).parse_args()


def build_model(options: argparse.Namespace) -> torch.nn.Module:
    """Return the model with random weights, the same in every process."""
    torch.manual_seed(options.seed)
    if options.model_config:
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(options.model_config))
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=options.hidden_size,
        intermediate_size=3 * options.hidden_size,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        num_key_value_heads=max(options.heads // 2, 1),
        max_position_embeddings=options.sequence_length,
    )
    return AutoModelForCausalLM.from_config(config)


def train_step(engine: Any, batches: Iterator[dict[str, Tensor]]) -> float:
    """Make one optimizer step; return the mean loss over its tokens."""
    micro_batches = engine.gradient_accumulation_steps()
    mean_loss = 0.0
    for _ in range(micro_batches):
        loss = engine(**next(batches)).loss
        engine.backward(loss)
        engine.step()
        mean_loss += engine.ring.mean_loss(loss).item() / micro_batches
    return mean_loss


@torch.no_grad()
def evaluate(engine: Any, held_out: PackedBytes, batches: int = 4) -> float:
    """Return the mean loss on documents that are not trained on."""
    engine.eval()
    loader = engine.ring.loader(held_out, engine.train_micro_batch_size_per_gpu(), drop_last=True)
    total = weights = 0.0
    for batch in itertools.islice(loader, batches):
        mean, weight = engine.ring.mean_loss(engine(**batch).loss), batch["num_items_in_batch"].item()
        total, weights = total + mean.item() * weight, weights + weight
    engine.train()
    return total / weights


def resume(engine: Any, loader: Any, report: Report, folder: Path) -> None:
    """Load weights, optimizer, step, position in the data and log of the newest whole checkpoint, if any."""
    path, state = engine.load_checkpoint(str(folder))
    if path is None:
        if dist.get_rank() == 0:
            print(f"--resume: no checkpoint in {folder}: starting afresh", flush=True)
        return
    report.restore(state["report"])
    loader.load_state_dict(state["loader"])


def train(
    options: argparse.Namespace, engine: Any, loader: Any, held_out: PackedBytes | None, report: Report
) -> None:
    """Train from the engine's step to the last one, with a progress bar on rank 0."""
    checkpoints, first = options.output / "checkpoints", engine.global_steps
    engine.ring.should_stop()  # from here on SIGTERM asks for a checkpoint
    batches = itertools.chain.from_iterable(itertools.repeat(loader))  # each epoch has another order
    tokens_per_step = int(engine.train_batch_size()) * options.sequence_length
    bar = tqdm(
        range(first + 1, options.steps + 1), total=options.steps, initial=first, unit="step",
        disable=dist.get_rank() != 0,
        mininterval=0.2 if sys.stderr.isatty() else 5.0,  # a log file gets a line now and then
    )  # fmt: skip
    for step in bar:
        started = time.perf_counter()
        report.losses.append(train_step(engine, batches))
        report.tokens_per_second.append(tokens_per_step / (time.perf_counter() - started))
        if held_out is not None and (step % options.evaluate_every == 0 or step == options.steps):
            report.held_out.append((step, evaluate(engine, held_out)))
        leaving = engine.ring.should_stop()
        if leaving or step == options.steps or (options.save_every and step % options.save_every == 0):
            state = {"report": asdict(report), "loader": loader.state_dict()}
            engine.save_checkpoint(str(checkpoints), client_state=state)
        if leaving and step < options.steps:
            sys.exit(os.EX_TEMPFAIL)  # for the launcher: nothing failed
        bar.set_postfix(loss=report.losses[-1], tokens_per_s=report.tokens_per_second[-1], refresh=False)


def compare_with_one_process(
    options: argparse.Namespace, engine: Any, documents: PackedBytes
) -> Comparison | None:
    """Run the trained weights once more on one process, with the first samples. Collective."""
    tokens = min(options.compare_tokens, options.sequence_length)
    if tokens <= 0 or tokens < engine.ring.config.min_sequence_length:
        return None  # not wanted, or not sharded
    samples = engine.train_micro_batch_size_per_gpu() * engine.ring.run_mesh.data_size
    whole = default_collate([documents[index] for index in range(samples)])
    whole = {name: tensor[:, :tokens] for name, tensor in whole.items()}
    plain = build_model(options).to(next(engine.module.parameters()).dtype)
    return compare(engine, plain, whole, engine.ring.pattern)


def require_exact(comparison: Comparison) -> None:
    """Exit with a status of its own if rounding does not explain the differences of the two runs."""
    if not comparison.exact:
        raise SystemExit("the ring and one process differ by more than rounding: see the lines above")


def main() -> None:
    """Train, compare, write the report."""
    options = parse_options()
    if not options.verbose:
        deepspeed.utils.logger.setLevel(logging.WARNING)
    model = build_model(options)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    path = options.deepspeed_config  # "documents": true in its pattern: batches must have their ids
    apart = path is not None and ds_ring.RingConfig.from_deepspeed(path).pattern.documents
    packed = partial(PackedBytes, options.sequence_length, seed=options.seed, document_ids=apart)
    documents, held_out = packed(), packed(held_out=True) if options.evaluate_every else None
    engine, _, loader, _ = ds_ring.initialize(
        args=options, model=model, model_parameters=model.parameters(), training_data=documents
    )
    mesh = engine.ring.run_mesh
    report = Report(
        f"{parameters:,} parameters, {options.sequence_length} tokens,"
        f" ring {mesh.ring_size} x data {mesh.data_size}, ZeRO {engine.zero_optimization_stage()}"
    )
    if options.resume:
        resume(engine, loader, report, options.output / "checkpoints")
    train(options, engine, loader, held_out, report)
    report.peak_mib = [0.0] * dist.get_world_size()
    dist.all_gather_object(report.peak_mib, peak_memory_mib())
    report.comparison = compare_with_one_process(options, engine, documents)
    if dist.get_rank() == 0:
        report.write(options.output)
        print(f"{report.title}\n{report.summary()}\npicture: {(options.output / 'training.png').resolve()}")
    dist.destroy_process_group()
    if report.comparison is not None:
        require_exact(report.comparison)


if __name__ == "__main__":
    main()
