"""Ablation studies, matrices and sweeps: from a configuration to a list of runs."""
