"""Run a script as a rank, by this file's path: `python -m` would look into the working folder first.

A working folder with a module `queue`, or a folder `torch`, would take the place of those modules in an
engine and in rank.py, where a script started by its path would never see them. Engines that start helpers by
`python -m` get PYTHONSAFEPATH from the launcher, which ends here: the script has what Python gives it.

    python -u rank_script.py [--local_rank=N] [--only] SCRIPT ...    --only: no log, no fault file
"""

import os
import sys

SAFE_PATH, ONLY = "ds-ring", "--only"  # the value tells it from one of the user's own

if __name__ == "__main__":
    if os.environ.get("PYTHONSAFEPATH") == SAFE_PATH:
        del os.environ["PYTHONSAFEPATH"]
    arguments = sys.argv[1:]
    before = [word for word in arguments[:1] if word.startswith("--local_rank")]
    if arguments[len(before)] == ONLY:
        script, *rest = arguments[len(before) + 1 :]
        os.execv(sys.executable, [sys.executable, "-u", script, *before, *rest])
    # process.py, start.py and others of this folder are no modules of the script's
    sys.path[:] = [folder for folder in sys.path if folder != os.path.dirname(os.path.abspath(__file__))]
    from ds_ring_launcher.run.rank import main

    main(arguments)
