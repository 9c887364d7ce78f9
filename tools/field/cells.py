"""List the questions."""

import torch

from ds_ring_launcher.compare.cells import Cell

CELLS = (
    Cell("full", causal=False),
    Cell("causal"),
    Cell("8:2 heads", heads=8, kv_heads=2),
    Cell("window of 13", window=13),
    Cell("4 documents", documents=(11, 30, 2, 21)),
    Cell("67 tokens", tokens=67),
    Cell("scores of 200", scale=50.0),
    Cell("bfloat16", dtype=torch.bfloat16),
)
