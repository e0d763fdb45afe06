"""Memory and FLOPs of a full-size training step, predicted without running the step."""
