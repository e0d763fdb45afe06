"""Audit of a run directory: completeness, consistency between files, and recomputed results."""
