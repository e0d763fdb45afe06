"""MLP → attention gate: a block's hidden layer gates the heads of the next block."""
