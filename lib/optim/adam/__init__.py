"""Adam: steps scaled by the root of the mean squared gradient."""
