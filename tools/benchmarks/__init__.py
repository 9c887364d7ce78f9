"""Benchmarks, one module each; `tools/bench.py` has their table, and runs them by name.

A module has `OPTIONS`, which become its command line, and a function from these options to `ResultRow`s.
Ranks, turns, clocks and medians are in `measuring.py`.
"""
