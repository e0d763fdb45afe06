"""What the training loop is made of."""
