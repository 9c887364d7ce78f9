"""Estimate memory, bytes and time of a run."""
