"""Movement pruning: removes the weights that move towards zero."""
