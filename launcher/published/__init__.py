"""Compare the planner's model with what others have measured and published: `ds-ring plan --published`."""
