"""Latent coupling: the MLP and the attention latents of neighbouring blocks read each other."""
