"""Profile real and virtual rings: memory by ring size and by step, and what each rank does when."""
