"""Reciprocal attention (RA): adds the score of the transposed pair inside a causal band."""
