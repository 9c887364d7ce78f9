"""Run `transport="tiles"`: K/V travel among a ranks, queries and partial results among b ranks, a b = P."""
