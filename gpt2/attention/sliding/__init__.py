"""Sliding pattern: a token sees a window of the most recent tokens, including itself."""
