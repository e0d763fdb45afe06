"""Evaluating a finished run with its weights rounded to a few bits; training has no such thing."""
