"""Measure this machine or cluster, and choose the section of the JSON for given shapes.

What is tried stands in candidates.py, what it should take in model.py, what is measured for that in probe.py
and links.py; passes.py times real passes, halving.py decides which of them are worth it, result.py says what
came out and writes it down. Every rank calls `tune`;
`python -m ds_ring_launcher.tune` does so inside any launcher.
"""
