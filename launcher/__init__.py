"""Turn one description of a cluster into the command line of an engine that exists already: `ds-ring`.

Installed as `ds_ring_launcher` (the folder's own name is too common for site-packages). It is a sibling of
ds_ring, not a part of it: nothing in ds_ring imports it. It reads the environment; of ds_ring three
files do (READS_THE_ENVIRONMENT in tests/test_architecture.py).

    cli.py       the command `ds-ring`
    commands/    its subcommands, one file each: options, and who does the work
    tables.py    tables that fit the terminal
    cluster/     YAML -> a frozen model (cluster_file.py, cluster.py), and what must hold on this machine
                 before anything is started (checks.py)
    engines/     job -> command line; one file an engine owns all about it
    run/         job.py: the input and the output of an engine; start.py: one attempt of a job, here or
                 on all hosts (agent.py); process.py: a command line, and the end of all processes that it
                 started; rank.py: inside a rank (by rank_script.py); culprit.py: which rank failed first;
                 relaunch.py: attempts until the job is done; run_lock.py: one launcher a run;
                 run_folder.py: the layout of a run's folder, which run_records.py reads;
                 local_ranks.py: a function on local ranks
    doctor/      faults of hosts, network and ring (findings.py)
    status/      the state of a run (run_status.py), as tables
    plan/        the estimator (estimate.py); inputs.py makes a setting of options, report.py makes tables
    tune/        rates of this machine; `python -m ds_ring_launcher.tune` inside any launch
    demo/        the quick start's training script
    compare/     this package and others over one sequence, checked and timed (comparison.py)
    check/       a model on a ring against one process (model_check.py; small_model.py: model, batch)
"""

from pathlib import Path


def configs_folder() -> Path:
    """Return configs/ of this version: in the installed package, or the package's neighbour in a checkout."""
    package = Path(__file__).resolve().parent
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"
