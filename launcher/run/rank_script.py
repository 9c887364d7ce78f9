"""Run a script as a rank, by this file's path: `python -m` would look into the working folder first.

A working folder with a module `queue`, or a folder `torch`, would take the place of those modules in an
engine and in rank.py, where a script started by its path would never see them. Engines that start helpers by
`python -m` get PYTHONSAFEPATH from the launcher, which ends here: the script has what Python gives it.

    python -u rank_script.py [--local_rank=N] [--first=N] [--only] SCRIPT ...

    --first     the first rank of this host. DeepSpeed's launcher takes a rank's remainder by the slots of its
                host for its local rank, so that those of hosts of 1 and 2 slots are 0, 1, 0.
    --only      no log, no fault file: this process becomes the script's
"""

import os
import sys

SAFE_PATH = "ds-ring"  # the value separates it from one of the user's own
ONLY, FIRST = "--only", "--first="
_LOCAL_RANK = "--local_rank="


def main(arguments: list[str]) -> None:
    """Run the script that `arguments` name."""
    if os.environ.get("PYTHONSAFEPATH") == SAFE_PATH:
        del os.environ["PYTHONSAFEPATH"]
    ours: list[str] = []
    while arguments[0].startswith((_LOCAL_RANK, FIRST, ONLY)):
        ours.append(arguments.pop(0))
    local = [word for word in ours if word.startswith(_LOCAL_RANK)]
    for word in ours:
        if word.startswith(FIRST):
            os.environ["LOCAL_RANK"] = str(int(os.environ["RANK"]) - int(word.removeprefix(FIRST)))
            local = [f"{_LOCAL_RANK}{os.environ['LOCAL_RANK']}" for _ in local]
    if ONLY in ours:
        os.execv(sys.executable, [sys.executable, "-u", arguments[0], *local, *arguments[1:]])
    # process.py, start.py and others of this folder are no modules of the script's
    sys.path[:] = [folder for folder in sys.path if folder != os.path.dirname(os.path.abspath(__file__))]
    from ds_ring_launcher.run import rank

    rank.main([*local, *arguments])


if __name__ == "__main__":
    main(sys.argv[1:])
