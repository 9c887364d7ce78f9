"""Define the subcommands of `ds-ring`: `add(commands)` declares one, `run(options, extra)` does it.

A module here imports at its head what the standard library has; torch and ds_ring inside `run`, so that
`--help` does not wait for them.
"""
