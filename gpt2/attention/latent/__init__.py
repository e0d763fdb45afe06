"""Latent projection (MLA): keys and values come from a narrow vector shared by all heads."""
