"""When latents travel in place of keys."""

from __future__ import annotations

import torch

from ds_ring.comm.mesh import RingMesh
from ds_ring.contrib.families.latents.layers import pays
from ds_ring.schedule.grid import Grid


def test_latents_pay_between_nodes_and_on_the_cpu():
    cuda, found = torch.device("cuda"), []
    for ring_size, ranks_per_node in ((4, 2), (4, 4), (4, None), (1, 2)):
        mesh = RingMesh(Grid(4, ring_size), 0, ranks_per_node=ranks_per_node)
        found.append((pays(mesh, cuda), pays(mesh, torch.device("cpu"))))
    assert found == [(True, True), (False, True), (False, True), (False, False)]
