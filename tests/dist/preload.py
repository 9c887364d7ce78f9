"""Imported once, by the server that ranks are forked from, so that no rank pays for these imports again.

What cannot be imported here is left to the ranks, which then fail with a proper traceback.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import sys

from tests.dist.rank_process import RANK_ENVIRONMENT

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
    "setuptools",
    "transformers.models.llama.modeling_llama",
    "ds_ring",
    "ds_ring.integrations.deepspeed.initialize",
    "ds_ring.integrations.transformers.attention",
    "ds_ring.runtime.kernels.flash",
    "ds_ring.schedule.choose",
)

for _module in _MODULES:
    with contextlib.suppress(Exception):
        importlib.import_module(_module)
for _name in getattr(sys.modules.get("ds_ring"), "__all__", ()):  # it imports them when they are asked for
    with contextlib.suppress(Exception):
        getattr(sys.modules["ds_ring"], _name)
gc.collect()
gc.freeze()  # a collection in a rank would write to, and so copy, every page that it shares with the server
# The ranks end when the server has ended: without a second or more of tearing torch down.
atexit.register(os._exit, 0)
