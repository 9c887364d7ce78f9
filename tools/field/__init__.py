"""Peers of ds_ring, run on the same tensors and compared with one dense computation (`tools/conformance.py`).

cells.py       what is asked of each: a mask, heads, a length, a dtype; the dense answer in float64
peers.py       a function for each package, from its own documentation
ranks.py       gloo ranks that go through the cells; what hangs is ended
training.py    evaluation loss and a step's gradients of whole trainers, beside one process
flash_attn.py  stand-in of the package flash-attn, which needs a GPU
"""
