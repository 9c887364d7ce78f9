"""Differences between the versions of other packages, one module for each package.

A module here probes for a feature; no other module compares a version or calls `hasattr` on another package.
"""
