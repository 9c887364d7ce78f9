"""Floor 6: where ds_ring meets other packages. Only files in here import deepspeed or transformers."""
