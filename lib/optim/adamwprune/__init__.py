"""AdamWPrune: an Adam-like optimizer whose state says which weights to prune."""
