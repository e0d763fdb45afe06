"""Magnitude pruning: removes the weights of smallest absolute value."""
