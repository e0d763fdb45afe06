"""Magnitude pruning: small weights go."""
