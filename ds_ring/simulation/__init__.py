"""Virtual ranks: what `ds_ring.simulate` is made of. Nothing here is imported by real ranks."""
