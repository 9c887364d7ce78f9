"""Examine hosts, network and ring before a run."""
