"""State pruning: what the optimizer remembers of a weight says whether it stays."""
