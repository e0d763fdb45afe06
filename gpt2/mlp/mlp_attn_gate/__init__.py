"""MLP → attention gate: the hidden layer of a block gates the heads of the next block."""
