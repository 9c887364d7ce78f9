"""Read the ranks of sequences from a `torch.distributed.DeviceMesh`."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh

from ds_ring.errors import RingMeshError, shown


def list_sequences(
    device_mesh: DeviceMesh, ring_dim: str, ulysses_dim: str | None
) -> tuple[list[list[int]], int]:
    """Return the ranks of every sequence, and the Ulysses size, of `RingMesh.from_device_mesh`'s arguments.

    Raises RingMeshError where it is no DeviceMesh, or has no such dimensions.
    """
    inner = [ring_dim] if ulysses_dim is None else [ring_dim, ulysses_dim]
    names = list(device_mesh.mesh_dim_names or ()) if isinstance(device_mesh, DeviceMesh) else []
    if not set(inner) <= set(names) or len(set(inner)) < len(inner):
        expected, advice = f"a DeviceMesh with the dimensions {inner}", "name them in init_device_mesh"
        raise RingMeshError.wrong("device_mesh", expected, shown(names or device_mesh), advice)
    # To [sequences, ring x Ulysses], the Ulysses dimension fastest: ring_rank * ulysses_size + ulysses_rank.
    ranks, outer = device_mesh.mesh, [name for name in names if name not in inner]
    ranks = ranks.permute([names.index(name) for name in [*outer, *inner]]).flatten(-len(inner))
    ulysses_size = 1 if ulysses_dim is None else device_mesh.mesh.shape[names.index(ulysses_dim)]
    return ranks.reshape(-1, ranks.shape[-1]).tolist(), ulysses_size
