"""The name of the ring's attention in transformers: `attn_implementation="ds_ring"`."""

NAME = "ds_ring"
