"""Chunked attention with explicit attention weights, without a B×N×T×T tensor."""
