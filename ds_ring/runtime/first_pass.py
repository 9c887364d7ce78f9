"""Decide how long a pass may wait for other ranks: longer where one of them compiles or connects.

Owns which pass that is. What waits, and what happens at a deadline, is the exchange's.

[Note: compile skew]
On a GPU each rank compiles its kernels at its own pace: one finds them in its cache, another one compiles for
minutes, and peers that no call has met yet connect. Whoever is done first waits meanwhile, for headers and
for messages. So a rank that is about to compile asks for `first_pass_timeout_s` in its header, and all ranks
wait that long (`MeshUse.patience_s`): in this pass and for the header of the next call, since a rank may
compile at the last hop of a pass. Every other wait has hop_timeout_s. Whether a pass compiles is the kernel's
own word: flex looks into the table of the functions that it has compiled (`flex_calls.py`'s [Note: one
compilation]). The first pass of its kind on a mesh counts as well, because its peers connect.
"""

from __future__ import annotations

from collections.abc import Hashable

from torch import Tensor

from ds_ring.runtime.mesh import RingMesh
from ds_ring.runtime.options import Options

COMPILES_NOTHING = {"cpu"}  # devices whose kernels need no compiler


def patience_s(
    mesh: RingMesh, options: Options, operation: str, q: Tensor, k: Tensor, compiles: bool
) -> float:
    """Return the seconds that this rank asks for in an operation that begins now; 0: hop_timeout_s does.

    Args:
        mesh: remembers which operations it has seen.
        options: has the deadline.
        operation: "attention forward", say.
        q, k: [B, H, S, D] and [B, G, S, D].
        compiles: the kernel is going to compile something.
    """
    if q.device.type in COMPILES_NOTHING:
        return 0.0
    kind: Hashable = (operation, options.kernel, q.dtype, q.shape[1], k.shape[1], q.shape[-1])
    known = kind in mesh.use.operations
    mesh.use.operations.add(kind)
    return 0.0 if known and not compiles else options.first_pass_timeout_s
