"""AdamW: Adam with decoupled weight decay."""
