"""Measure this machine or cluster, and choose the section of the JSON for given shapes.

candidates.py lists the trials, measurements.py times the kernel, the network and real passes, model.py
predicts the time of a candidate, search.py chooses, result.py writes the choice down. Every rank calls
`tune`; `python -m ds_ring_launcher.tune` does so inside any launcher.
"""
