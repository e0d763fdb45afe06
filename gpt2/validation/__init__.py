"""What a trained or a built model does on this machine: retrieval, and the same numbers as elsewhere."""
