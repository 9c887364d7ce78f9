"""Imported once, by the server that ranks are forked from, so that no rank pays for these imports again.

What cannot be imported here is left to the ranks, which then fail with a proper traceback.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import warnings
from pathlib import Path

from tests.dist.monitors import Monitors
from tests.dist.rank_server import RANK_ENVIRONMENT

os.environ.update(RANK_ENVIRONMENT)  # DeepSpeed looks for its accelerator when it is imported

# Importing these starts no thread: only the thread that forks would survive in a rank.
_MODULES = (
    "torch",
    "torch.distributed",
    "torch.nn.attention.flex_attention",
    "torch._inductor.compile_fx",
    "numpy.ma",
    "pytest",
    "deepspeed",
    "deepspeed.module_inject.auto_ep_layer",  # these when the first engine is made
    "deepspeed.ops.op_builder.all_ops",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "deepspeed.comm.mori",
    "torch._subclasses.schema_check_mode",
    "torch.utils.serialization.config",
    "setuptools",
    "distutils.unixccompiler",  # with it, where Python has none of its own; by torch's C++ extensions
    "encodings.idna",  # when a first address is looked up
    "transformers.models.llama.modeling_llama",
    "tests.dist.deepspeed_ranks",
)

_ROOT = Path(__file__).parents[2]
# Not of contrib: megatron.core changes what torch.load takes for safe.
_OWN = [
    ".".join(path.relative_to(_ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted(_ROOT.glob("ds_ring/**/*.py"))
    if "contrib" not in path.parts
]
for _module in (*_MODULES, *_OWN):
    with contextlib.suppress(Exception), warnings.catch_warnings(action="ignore"):
        importlib.import_module(_module)
with contextlib.suppress(Exception):
    # DeepSpeed compiles a program to see which operators it may build: once here, not in every rank.
    importlib.import_module("deepspeed.ops").__compatible_ops__  # noqa: B018
with contextlib.suppress(ImportError):
    joining = importlib.import_module("ds_ring.health.joining")
    folder = str(Path(joining.handshake.__file__).parent)
    setattr(joining, "start_monitor", Monitors(folder, joining.start_monitor).start)  # noqa: B010
# ZeRO 3 prints its parameters into a text that it throws away, 25 ms in each rank of each engine.
importlib.import_module("torch").set_printoptions(threshold=8, edgeitems=1)
gc.collect()
gc.freeze()  # a collection in a rank would write to, and so copy, every page that it shares with the server
# The ranks end when the server has ended: without a second or more of tearing torch down.
atexit.register(os._exit, 0)
