"""The same bits of a token's logits in any batch, in a generation, and on every ring."""
