"""Starts planned runs in worker processes, a few at a time, and knows what is already done."""
