"""Learned positions: GPT-2's table, a row of which is added to each token's embedding."""
