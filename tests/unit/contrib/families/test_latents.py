"""When latents travel in place of keys."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ds_ring import Causal, SlidingWindow
from ds_ring.comm.mesh import RingMesh
from ds_ring.contrib.families.latents.layers import pays, why_not
from ds_ring.schedule.grid import Grid


def test_latents_pay_between_nodes_and_on_the_cpu():
    cuda, found = torch.device("cuda"), []
    for ring_size, ranks_per_node in ((4, 2), (4, 4), (4, None), (1, 2)):
        mesh = RingMesh(Grid(4, ring_size), 0, ranks_per_node=ranks_per_node)
        found.append((pays(mesh, cuda), pays(mesh, torch.device("cpu"))))
    assert found == [(True, True), (False, True), (False, True), (False, False)]


def make_layer(**changes: Any) -> Any:
    """A layer whose latents travel; `changes` are attributes, None for none."""
    sizes = {"num_heads": 2, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 4}
    parts = {"expand_kv": lambda kv_nope, k_rot: None, "kv_b_proj": nn.Linear(8, 16, bias=False)}
    values = sizes | parts | changes
    return SimpleNamespace(**{name: value for name, value in values.items() if value is not None})


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, None),
        ({"expand_kv": None}, "has no method expand_kv(kv_nope, k_rot)"),
        ({"expand_kv": lambda latent: None}, "has no method expand_kv(kv_nope, k_rot)"),
        ({"kv_lora_rank": None, "v_head_dim": None}, "does not say kv_lora_rank, v_head_dim"),
        ({"indexer": 1}, "selects keys by an indexer"),
        ({"qk_rope_head_dim": 0}, "has no rotary key"),
        ({"kv_b_proj": nn.Linear(8, 16)}, "adds a bias to the expanded keys"),
        ({"kv_b_proj": nn.Sequential(nn.Dropout(0.1))}, "has dropout in its up-projection"),
        ({"kv_b_proj": nn.Sequential(nn.Dropout(0.0))}, None),
    ],
)
def test_layers_whose_latents_do_not_travel_say_why(changes: dict[str, Any], why: str | None) -> None:
    patterns = SimpleNamespace(pattern=Causal(), named={"local": SlidingWindow(4)})
    session: Any = SimpleNamespace(patterns=patterns)
    assert why_not(make_layer(**changes), session) == why
