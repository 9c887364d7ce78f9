"""Train a tiny model on a ring, slowly, and fail as told: the script of jobs that are relaunched.

An ordinary script of `ds_ring.initialize` without transformers, whose imports would be most of an attempt. Each
step's batch follows from its number, so a resumed run has the losses of the run that was never interrupted.
A fault strikes once: the file `armed` in --output is taken away first (`bug` strikes in every attempt).
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
import time
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist

import ds_ring

VOCABULARY, HIDDEN = 61, 32


class Tiny(torch.nn.Module):
    """One attention layer between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(VOCABULARY, HIDDEN)
        self.qkv = torch.nn.Linear(HIDDEN, 3 * HIDDEN)
        self.head = torch.nn.Linear(HIDDEN, VOCABULARY)
        self.session = None

    def forward(self, input_ids: torch.Tensor, **_: object) -> torch.Tensor:
        x = self.embed(input_ids)
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return self.head(x + self.session.attention()(q, k, v).transpose(1, 2).flatten(2))


def options_of() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--save-every", type=int, default=2)
    parser.add_argument("--step-seconds", type=float, default=0.1)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--fault", choices=("none", "bug", "kill"), default="none")
    parser.add_argument("--fault-step", type=int, default=7)
    parser.add_argument("--fault-rank", type=int, default=1)
    return deepspeed.add_config_arguments(parser).parse_args()


def batch_of(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids_BT = torch.randint(0, VOCABULARY, (2, 128), generator=generator)
    return {"input_ids": ids_BT, "labels": ids_BT}


def strike(options: argparse.Namespace) -> None:
    """Let this rank fail, if it is its turn."""
    if options.fault == "bug":
        raise ZeroDivisionError("on purpose")
    try:
        (options.output / "armed").unlink()
    except FileNotFoundError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    options = options_of()
    deepspeed.utils.logger.setLevel(logging.WARNING)
    torch.manual_seed(0)
    model = Tiny()
    engine, *_ = ds_ring.initialize(args=options, model=model, model_parameters=model.parameters())
    model.session = ring = engine.ring
    ring.should_stop()  # from here on SIGTERM asks for a checkpoint
    engine.load_checkpoint(str(options.output / "checkpoints"))
    for step in range(engine.global_steps + 1, options.steps + 1):
        if dist.get_rank() == options.fault_rank and step == options.fault_step and options.fault != "none":
            strike(options)
        batch = ring.shard_batch(batch_of(step))
        loss = ring.loss(engine(**batch), batch)
        engine.backward(loss.backward_loss)
        engine.step()
        if dist.get_rank() == 0:
            line = {"step": step, "loss": loss.mean_loss.item(), "at": time.time()}
            line |= {"world_size": dist.get_world_size()}
            with open(options.output / "losses.jsonl", "a") as file:
                file.write(json.dumps(line) + "\n")
        time.sleep(options.step_seconds)
        leaving = ring.should_stop()
        if leaving or step % options.save_every == 0 or step == options.steps:
            engine.save_checkpoint(str(options.output / "checkpoints"))
        if leaving:
            sys.exit(os.EX_TEMPFAIL)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
