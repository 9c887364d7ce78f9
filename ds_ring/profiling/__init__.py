"""Profiles of real and virtual rings: memory by ring size and by step, and who does what when."""
