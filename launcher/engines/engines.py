"""List the engines by the word that the cluster YAML has for them."""

from __future__ import annotations

from .deepspeed import DeepSpeed
from .engine import ENGINES
from .mpirun import Mpirun
from .slurm import Slurm
from .torchrun import Torchrun

ENGINES |= {"deepspeed": DeepSpeed(), "torchrun": Torchrun(), "mpirun": Mpirun(), "slurm": Slurm()}
