"""Adam: steps scaled by the root of the second moment."""
