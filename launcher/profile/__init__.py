"""Draw memory and timelines of ring passes."""
