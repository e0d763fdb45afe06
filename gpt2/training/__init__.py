"""Components of the training loop."""
