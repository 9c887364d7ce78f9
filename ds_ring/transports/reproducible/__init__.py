"""The transport "reproducible": the same bits on rings of any size, for batches and for generations."""
