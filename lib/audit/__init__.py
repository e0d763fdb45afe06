"""Whether a run's directory is whole, agrees with itself, and can be computed again from itself."""
