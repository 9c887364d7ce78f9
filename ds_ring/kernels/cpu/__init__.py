"""The kernel "cpu": attention by PyTorch's CPU operators, tile by tile. Sizes of its calls, in tokens."""

BLOCK = 2048  # most queries of a call, and most keys in the backward pass
BIASED = 1024  # most queries and most keys of a call with a bias for each pair
TRIANGLE = 128  # side of the smallest triangle
