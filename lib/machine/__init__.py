"""Machine of a run: device, precision and kernels, as requested, resolved and observed."""
