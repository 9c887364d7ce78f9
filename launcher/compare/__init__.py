"""Compare ways to attend over one sequence on the devices of this machine: `ds-ring compare`.

cells.py       what is asked of each: a mask, heads, a length, a dtype; the answer of one process
peers.py       a function for each contestant, from its package's documentation
worker.py      a rank of one contestant: checks and times cells that its parent sends
group.py       the ranks of one contestant, under a deadline; what their replies amount to
comparison.py  the order of checks and timed rounds, within a budget of seconds
report.py      the page and the JSON
"""
