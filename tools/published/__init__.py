"""Measurements that others have published, and models of their methods: `python tools/bench.py published`."""
