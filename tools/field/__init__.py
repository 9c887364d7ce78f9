"""Peers of ds_ring on small questions of many kinds (`tools/conformance.py`); `launcher/compare` runs them.

cells.py       the questions
peers.py       the contestants of `ds-ring compare`, and others; a seeded fault
training.py    evaluation loss and a step's gradients of whole trainers, beside one process
flash_attn.py  stand-in of the package flash-attn, which needs a GPU
"""
