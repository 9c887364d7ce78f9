"""Compare a model on a ring with the same model in one process."""
