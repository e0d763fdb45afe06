"""State pruning: the optimizer's moments determine the pruned weights."""
