"""Build the command lines of engines, and start a rank under those that need it."""
