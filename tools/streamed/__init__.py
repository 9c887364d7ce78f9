"""Run virtual ranks whose shards are larger than memory; `tools/billion_tokens.py` is their command line."""
