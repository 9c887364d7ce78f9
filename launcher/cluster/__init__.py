"""Read a cluster's YAML, and check what must hold on this machine before anything is started."""
