"""Start the ranks of a job by an engine; one file holds all that is said about one engine."""
