"""The list of runs of a study, a test matrix, a sweep or one training."""
