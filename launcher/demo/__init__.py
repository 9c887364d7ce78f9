"""Train a small model on a ring and write a report about it: `ds-ring demo`, and the quick start's script.

`train_lm.py` is the script, an ordinary DeepSpeed script; `lm_*.py` are its data, its comparison with one
process and its log. `measure.py` measures rings on this machine, `report.py` writes the HTML file.
"""
