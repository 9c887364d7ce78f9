"""Train a small model on a ring: the quick start's script.

`train_lm.py` is the script, an ordinary DeepSpeed script; `lm_*.py` are its data, its comparison with one
process and its log.
"""
