"""Decide how long a pass may wait for other ranks: longer where it is the first one of a shape.

Owns which pass that is. What waits, and what happens at a deadline, is the exchange's.

[Note: compile skew]
In the first pass of a shape on a GPU each rank compiles its kernels at its own pace: one finds them in its
cache, another one compiles for minutes, and peers that no call has met yet connect. Whoever is done first
waits meanwhile, for headers and for the first messages. So all waits of such a pass, forward and backward,
have `first_pass_timeout_s` (hop_timeout_s where that is more); every later pass has hop_timeout_s. A shape is
what flex compiles for: heads, head dimension, dtype, kernel. The number of tokens is not part of it.
"""

from __future__ import annotations

from torch import Tensor

from ds_ring.runtime.mesh import RingMesh
from ds_ring.runtime.options import Options

COMPILES_NOTHING = {"cpu"}  # devices whose kernels need no compiler


def hop_deadline_s(mesh: RingMesh, options: Options, operation: str, q: Tensor, k: Tensor) -> float:
    """Return the seconds that a wait of a pass that begins now may take; [Note: compile skew].

    Args:
        mesh: remembers the shapes of its passes.
        options: has both deadlines.
        operation: "attention forward", say.
        q, k: [B, H, S, D] and [B, G, S, D].
    """
    kernel = (options.kernel, options.kernel_options, options.block_size)
    shape = (operation, kernel, q.dtype, q.shape[1], k.shape[1], q.shape[-1])
    first = q.device.type not in COMPILES_NOTHING and shape not in mesh.use.shapes
    mesh.use.shapes.add(shape)
    return max(options.hop_timeout_s, options.first_pass_timeout_s) if first else options.hop_timeout_s
