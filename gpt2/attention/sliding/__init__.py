"""Sliding pattern: a token sees a window of the latest tokens, itself included."""
