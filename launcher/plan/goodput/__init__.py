"""Plan for faults: which share of months is useful, and how often to save (`ds-ring plan --goodput`).

    faults.py        published rates of faults; measured times until the detector knows of one
    simulation.py    one job, from fault to fault
    closed_forms.py  Young's and Daly's interval, the expected share: what the simulation is checked with
    schedules.py     what others have published, simulated by the same code
    report.py        rows for some numbers of GPUs, as tables and as JSON

Nothing else of the planner imports this folder but the command.
"""
