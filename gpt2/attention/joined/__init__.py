"""Attention by passes over windows, joined by log-sum-exp: what a GPU runs without walking rows."""
