"""Start the ranks of a job, watch them, keep what they say, and start them again."""
