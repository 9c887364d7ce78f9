"""Stand-ins for `tools/simulate_cluster.py`: what a cluster has and one machine does not, in place of it.

    engine.py        in place of mpirun: forks all ranks from one process
    hosts.py         in place of sshd: answers for every host (the program `ssh` speaks to it)
    rank_script.py   in place of a training script: joins the monitor and waits
    store.py         in place of the store's client in torch, which the ranks do not import
    figures.py       what the ranks note for the tool, in memory that all share
    launcher.py      `ds-ring launch` with that engine

Everything else is the real code: the launcher, its agents on hosts, monitor, joining, heartbeats, folders.
"""
