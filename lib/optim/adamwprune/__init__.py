"""AdamWPrune: an Adam-like optimizer whose moments determine the pruned weights."""
