"""Learned positions: GPT-2's position embedding table, added to the token embeddings."""
