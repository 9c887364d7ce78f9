"""Train on a ring whose ranks Ray Train started: its process group becomes the mesh.

Example:
    pip install "ray[train]" && DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 python configs/examples/ray_train.py
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import ray
from ray.train import RunConfig, ScalingConfig, report
from ray.train.torch import TorchConfig, TorchTrainer

HERE = str(Path(__file__).parent)
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    "steps_per_print": 1_000_000,
    "ring_attention": {"ring_size": "auto", "layout": "auto", "pattern": {"causal": True}},
}


def train(config: dict[str, Any]) -> None:
    """Run on every worker: Ray has made the process group and its environment."""
    sys.path.insert(0, HERE)
    import text

    import ds_ring

    model = text.model()
    engine, _, loader, _ = ds_ring.initialize(
        model=model, model_parameters=model.parameters(), training_data=text.samples(16, 120), config=config
    )
    assert loader is not None, "training data were given"
    for batch in loader:
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        metrics = {"loss": engine.ring.mean_loss(loss).item(), "ring_size": engine.ring.mesh.ring_size}
        report(metrics)
        if engine.global_rank == 0:
            print(metrics, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpus", action="store_true", help="one GPU for each worker, NCCL")
    parser.add_argument("--output", default="runs/ray_train")
    options = parser.parse_args()
    variables = {
        name: os.environ[name] for name in ("DS_ACCELERATOR", "OMP_NUM_THREADS") if name in os.environ
    }
    ray.init(runtime_env={"env_vars": variables}, include_dashboard=False)
    trainer = TorchTrainer(
        train,
        train_loop_config=CONFIG | {"sequence_parallel_size": options.workers},
        torch_config=TorchConfig(backend="nccl" if options.gpus else "gloo"),
        scaling_config=ScalingConfig(num_workers=options.workers, use_gpu=options.gpus),
        run_config=RunConfig(storage_path=str(Path(options.output).absolute())),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
