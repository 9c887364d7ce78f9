"""List the engines by the word that the cluster YAML has for them."""

from __future__ import annotations

from .deepspeed import DeepSpeed
from .engine import Engine
from .mpirun import Mpirun
from .slurm import Slurm
from .torchrun import Torchrun

ENGINES: dict[str, Engine] = {
    "deepspeed": DeepSpeed(),
    "torchrun": Torchrun(),
    "mpirun": Mpirun(),
    "slurm": Slurm(),
}
