"""Attention row by row: for what needs the rows of weights, without a B×N×T×T tensor."""
