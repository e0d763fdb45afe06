"""The machine a run uses: device, precision, kernels; requested, then resolved, then observed."""
