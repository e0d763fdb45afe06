"""Dense projection: every head has its own queries, keys and values, as in GPT-2."""
