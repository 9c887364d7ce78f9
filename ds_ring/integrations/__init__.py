"""Connect ds_ring to other packages. Only files in here import deepspeed or transformers."""
