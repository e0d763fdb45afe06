"""Latent coupling: the MLP reads its block's latent keys and shifts those of the next block."""
