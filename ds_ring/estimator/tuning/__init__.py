"""Measure this machine or cluster, and choose the section of the JSON for given shapes.

What is tried stands in candidates.py, what it should take in model.py, what is measured for that in probe.py
and links.py; passes.py times real passes, halving.py decides which of them are worth it, result.py says what
came out and writes it down. Every rank calls `tune`;
`python -m ds_ring.estimator.tuning` does so inside any launcher.

[Note: tuning in a tenth of the time]
A search takes a tenth of the time that trying everything takes. A model of measured rates ranks the
candidates. The best ones, and the best of every kind, are timed in real passes, and the better half goes on
to longer ones. The defaults stay where nothing beats them by a hundredth. The rate that is written down is
the one that the chosen pass had with its pattern: windows and LongNet run at another rate than a triangle, by
up to 27 %. Ranks that share cores are as slow as their sum, so the speed of a rank alone is measured, too.
"""

from ds_ring.estimator.tuning.request import Request, request_from
from ds_ring.estimator.tuning.result import Result
from ds_ring.estimator.tuning.search import tune

__all__ = ["Request", "Result", "request_from", "tune"]
