"""Validation of models on the present machine: kernel correctness and long-range retrieval."""
