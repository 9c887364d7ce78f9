"""Turn one description of a cluster into the command line of an engine that exists already: `ds-ring`.

Installed as `ds_ring_launcher` (the folder's own name is too common for site-packages). It sits beside
ds_ring, not below it: nothing in ds_ring imports it, and it is the only place that reads the environment.

    cli.py           the command and its options
    yaml_file.py     reads YAML strictly; knows no key
    cluster.py       the YAML's keys, as a frozen model
    cluster_file.py  YAML -> model, every problem in one error
    hostfile.py      DeepSpeed's hostfile -> the hosts of a YAML
    checks.py        what must hold on this machine before anything is started
    ports.py         free ports
    job.py           what goes into an engine; invocation.py: what comes out
    engines.py       job -> command line; the table of engines (engines/deepspeed.py, engines/slurm.py)
    open_files.py    the limit of open files
    secret.py        one secret for all ranks of a launch
    start.py         one attempt of a job, here or on all hosts
    relaunch.py      attempts of a job until it is done: attempts.py decides, presence.py (probe.py) finds the
                     hosts, ring_sizes.py the ring, convert_checkpoint.py fits the checkpoint to it
    run_folder.py    the folder of a run: logs, faults and figures by rank and attempt (layout: its docstring)
    run_status.py    what is known of a run from that folder (saved_checkpoints.py: its checkpoints), for
                     status/table.py and status/page.py (status/chart.py: its curves), which status/keeper.py
                     renews while the launcher lives
    rank.py          runs inside a rank: its log, and what ended it, go into that folder
    process.py       runs a command line, ends every process it led to (marked.py finds them)
    guardian.py      ends them where the launcher itself was killed
    remote.py        other hosts: agent.py on each, by ssh
    mpi_rank.py      runs inside a rank that mpirun started (slurm_rank.py: that srun started)
    local_ranks.py   runs a function on ranks of this machine (rank_process.py: their first lines)
    model_check.py   one model on a ring against one process (small_*.py: model, batch)
    plan/inputs.py   options of `plan` -> a setting (model_file.py: its model, hardware_file.py: its devices)
    plan/report.py   what `plan` found, as tables and JSON
"""
