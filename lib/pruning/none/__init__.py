"""No pruning."""
