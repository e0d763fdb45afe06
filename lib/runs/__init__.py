"""Reproducibility of runs: seeds and random streams, provenance of the code, and the manifest."""
