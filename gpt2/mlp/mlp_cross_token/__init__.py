"""Cross-token MLP: the hidden layer mixes tokens by this block's attention weights."""
