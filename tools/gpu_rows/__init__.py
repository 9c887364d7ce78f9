"""The rows of tools/gpu_first.py: a module for each of its parts, and the processes that compute them."""
