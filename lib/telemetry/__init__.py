"""Machine telemetry of a training run, sampled by a sidecar process."""
