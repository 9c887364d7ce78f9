"""Models of transformers that compute attention eagerly in their own code, or number their own tokens.

families.py has a row for each model type, scores.py the object that replaces the scores of a module,
layers.py the table's row and its patches.
"""
