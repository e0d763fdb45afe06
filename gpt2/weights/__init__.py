"""Import of transformers GPT-2 weights as initial weights, and export of finished runs."""
