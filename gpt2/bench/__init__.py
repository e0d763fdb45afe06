"""Speed benchmarks: a training step, sparse attention, and the tables of a GPU."""
