"""Simulate the ranks of a ring in one process: what `ds_ring.simulate` is made of."""
