"""Pruners: select the weights that are set to zero during training, and when."""
