"""Cross-token MLP: the hidden layer mixes tokens with the attention weights of the block."""
