"""Runs, planned and on disk: names, paths, status, provenance, checkpoints and records."""
