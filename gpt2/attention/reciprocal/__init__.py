"""Reciprocal attention (RA): the score as seen from the other token, inside a causal band."""
