"""Movement pruning: weights that move towards zero go."""
