"""Measure this machine or cluster for `ds-ring plan`.

measurements.py times the kernel, the links and real passes, hardware_file.py describes them. Every rank calls
`measure`; `python -m ds_ring_launcher.tune` does so inside any launcher.
"""
