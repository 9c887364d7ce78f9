"""Virtual ranks: `ds_ring.simulate` and what it is made of. Nothing here is imported by real ranks."""
