"""Prove that the schedules of all ranks fit together and compute what the pattern asks for."""
