"""Layers that pass on a state or look back a few tokens: convolutions, state-space models, delta rules.

scan.py has what all share, functions.py and methods.py wrap what layers call, layers.py is the table's row.
"""
